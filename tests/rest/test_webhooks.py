"""Notices: sent at least once, by one service, signed; an address that hangs or fails delays nobody."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager import GPUResourceManager, MemoryStore
from resource_manager.core.cluster_settings import Notice
from resource_manager.core.models import JobPlace
from resource_manager.errors import ClusterFileError, InvalidRequestError
from resource_manager.manager.cluster_change import ApplyOptions
from resource_manager.manager.cluster_file.reading import ClusterFiles
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.console.cluster_page import NoticeCache
from resource_manager.rest.observability.metrics import Metrics
from resource_manager.rest.state_follower import StateFollower
from resource_manager.rest.webhooks import (
    CLAIM_S,
    FIRST_PAUSE_S,
    PAGE,
    SIGNATURE,
    NoticeSender,
    UndeliveredError,
    deliver,
    failed_attempts,
    is_public,
)
from tests.builders import Clock
from tests.redis_server import RedisServer

ALL = ("preempted", "idle", "quarantined", "gpu closed", "server silent")


class Killed(BaseException):
    """The death of a service."""


class Hook:
    """A webhook that answers as it is told and remembers what it was sent."""

    def __init__(self) -> None:
        self.got: list[tuple[bytes, Mapping[str, str]]] = []
        self.answers: Callable[[str], tuple[int, dict[str, str]]] = lambda path: (200, {})
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers = hook.answers(self.path)
                if status == 200:
                    hook.got.append((body, dict(self.headers)))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body, _ in self.got]


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


def manager_of(clock: Clock, *notices: dict[str, Any]) -> GPUResourceManager:
    manager = GPUResourceManager(store=MemoryStore(clock=clock), inventory=default_inventory())
    manager.apply(ClusterForm.model_validate({"notices": list(notices)}))
    return manager


def sender(manager: GPUResourceManager, **more: Any) -> NoticeSender:
    return NoticeSender(manager, StateFollower(manager.store), **more)


def quarantine(manager: GPUResourceManager, clock: Clock, name: str, **more: Any) -> None:
    manager.submit(name, **{"gpus": 2, "quarantine": True, "ttl": 1, **more})
    clock.now += 2
    manager.expire_and_schedule()


def test_an_event_is_sent_once_signed_and_with_a_text_for_people(hook: Hook) -> None:
    clock = Clock()
    manager = manager_of(clock, {"on": ["quarantined"], "to": hook.url, "team": "vision"})
    quarantine(manager, clock, "mine", team="vision")
    quarantine(manager, clock, "other", team="nlp")
    one, two = sender(manager, key="secret"), sender(manager, key="secret")
    for each in (one, two, one):
        each.send()
    [event] = hook.events
    assert event["specversion"] == "1.0"
    assert event["type"] == "gpu-manager.quarantined"
    assert event["text"].startswith("mine ")
    assert "is quarantined: its job may still run" in event["text"]
    [(body, headers)] = hook.got
    assert headers[SIGNATURE] == f"sha256={hmac.new(b'secret', body, hashlib.sha256).hexdigest()}"


def with_addresses(manager: GPUResourceManager) -> GPUResourceManager:
    """Return the manager with four servers on which a gang can run."""
    servers = [{"name": f"g{n}", "address": f"gpu@g{n}", "gpus": 8, "cpus": 8} for n in range(4)]
    manager.apply(ClusterForm.model_validate({"servers": servers}))
    return manager


def test_what_is_left_of_a_gang_is_told_once_and_counted_once(hook: Hook) -> None:
    """It keeps its GPUs until a person or the reconciler ends it, as a lease that was quarantined whole."""
    clock = Clock()
    manager = with_addresses(manager_of(clock, {"on": ["quarantined"], "to": hook.url}))
    metrics = Metrics(StateFollower(manager.store))
    manager.submit("gang", 8, 1, nodes=4)
    [lease] = manager.leases()
    manager.place_job("gang", [JobPlace("ssh")] * 4, fencing_token=lease["fencing_token"])
    for rank in (1, 0):
        clock.now += 1
        manager.release_members("gang", [rank], fencing_token=lease["fencing_token"], job_end="ended")
    sender(manager).send()
    [event] = hook.events
    servers = ", ".join(lease["members"][rank]["server_name"] for rank in (0, 2, 3))
    assert f" on {servers} is quarantined: its job may still run" in event["data"]["text"]
    assert 'gpu_manager_expirations_total{quarantined="true"} 1.0' in metrics.text().decode()


def test_the_release_of_what_was_quarantined_already_is_no_event(hook: Hook) -> None:
    clock = Clock()
    manager = with_addresses(manager_of(clock, {"on": ["quarantined"], "to": hook.url}))
    metrics = Metrics(StateFollower(manager.store))
    quarantine(manager, clock, "gang", nodes=2)
    [lease] = manager.leases()
    clock.now += 1
    manager.release_members("gang", [0], fencing_token=lease["fencing_token"], job_end="ended")
    sender(manager).send()
    assert len(hook.events) == 1
    assert 'gpu_manager_expirations_total{quarantined="true"} 1.0' in metrics.text().decode()


def test_the_release_by_force_of_what_was_quarantined_already_is_no_event(hook: Hook) -> None:
    clock = Clock()
    manager = with_addresses(manager_of(clock, {"on": ["quarantined"], "to": hook.url}))
    manager.submit("lost", 2, 1, ttl=1, quarantine=True)
    token = manager.leases()[0]["fencing_token"]
    manager.place_job("lost", [JobPlace("ssh")], fencing_token=token)
    clock.now += 2
    manager.expire_and_schedule()
    clock.now += 1
    manager.release("lost", fencing_token=token, job_end="forced")
    assert manager.leases()[0]["revoked"]
    sender(manager).send()
    assert len(hook.events) == 1


def test_no_name_calls_a_channel_together_or_hides_a_link(hook: Hook) -> None:
    clock, name = (
        Clock(),
        "<!channel> <https://evil.example|log in> & @all [log in](https://evil.example) ada@desk",
    )
    manager = manager_of(clock, {"on": ["quarantined"], "to": hook.url})
    quarantine(manager, clock, name)
    sender(manager).send()
    [event] = hook.events
    assert event["text"].startswith(
        "&lt;!channel&gt; &lt;https://evil.example|log in&gt; &amp; "
        "@\u200ball [log in] (https://evil.example) ada@desk "
    )
    assert event["data"]["text"].startswith(f"{name} ")


def test_closed_gpus_and_preempted_leases_are_told(hook: Hook) -> None:
    clock = Clock()
    manager = manager_of(clock, {"on": list(ALL), "to": hook.url})
    manager.drain("gpu-server-0", gpu=3, reason="fan")
    manager.submit("t", 8, max_runtime=100, ttl=1000, server="gpu-server-1")
    clock.now += 60
    manager.expire_and_schedule()
    sender(manager).send()
    assert [event["text"].replace("  ", " ") for event in hook.events] == [
        "GPU 3 of gpu-server-0 takes no new leases: drained; fan",
        hook.events[1]["text"],
    ]
    assert hook.events[1]["text"].endswith("is preempted: its longest runtime is over")


def test_an_address_that_fails_is_tried_again_later_and_keeps_nothing_from_others(hook: Hook) -> None:
    clock = Clock()
    entries = [{"on": ["quarantined"], "to": f"{hook.url}{path}"} for path in ("/bad", "/good")]
    manager = manager_of(clock, *entries)
    hook.answers = lambda path: (500 if path == "/bad" else 200, {})
    quarantine(manager, clock, "t")
    one = sender(manager)
    for _ in range(2):
        one.send()
    assert len(hook.got) == 1
    hook.answers = lambda path: (200, {})
    one.send()
    assert len(hook.got) == 1, "it is not tried again at once"
    notices = manager.read(lambda cluster, now: cluster.settings.notices)
    assert failed_attempts(manager.store, notices) == {("127.0.0.1", ""): 1}
    clock.now += 6
    one.send()
    assert len(hook.got) == 2
    assert failed_attempts(manager.store, notices) == {("127.0.0.1", ""): 0}


def test_a_newer_service_beside_this_one_may_have_added_to_what_is_kept_of_an_address(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an upgrade of one service after the other: metrics and pages of the older one failed."""
    clock = Clock()
    manager = manager_of(clock, {"on": ["quarantined"], "to": hook.url})
    quarantine(manager, clock, "first")
    put = manager.store.reports.put

    def put_more(name: str, report: bytes, record: bytes, ttl_s: float) -> None:
        put(name, report, json.dumps({**json.loads(record), "new": 1}).encode(), ttl_s)

    with monkeypatch.context() as patched:
        patched.setattr(manager.store.reports, "put", put_more)
        sender(manager).send()
    notices = manager.read(lambda cluster, now: cluster.settings.notices)
    assert failed_attempts(manager.store, notices) == {("127.0.0.1", ""): 0}
    quarantine(manager, clock, "second")
    sender(manager).send()
    assert [event["subject"].split()[0] for event in hook.events] == ["first", "second"]


def test_pages_say_that_an_address_takes_no_notices(hook: Hook) -> None:
    clock = Clock()
    manager = manager_of(clock, {"on": ["quarantined"], "to": hook.url})
    hook.answers = lambda path: (500, {})
    quarantine(manager, clock, "t")
    one = sender(manager)
    for attempt in range(4):
        assert not any("127.0.0.1" in line for line in NoticeCache().of(manager)), attempt
        one.send()
        clock.now += 600
    lines = [line for line in NoticeCache().of(manager) if "127.0.0.1" in line]
    assert lines == [
        "127.0.0.1 has not taken 4 attempts to send it a notice: the service's log says what it answered"
    ]


def test_an_address_that_hangs_delays_neither_others_nor_a_commit(hook: Hook) -> None:
    clock, goes_on = Clock(), threading.Event()
    entries = [{"on": ["quarantined"], "to": f"{hook.url}{path}"} for path in ("/hangs", "/good")]
    manager = manager_of(clock, *entries)
    hook.answers = lambda path: ((path == "/hangs" and goes_on.wait(20) and 200) or 200, {})
    quarantine(manager, clock, "t")
    one, began = sender(manager), time.monotonic()
    quarantine(manager, clock, "u")
    while len(hook.got) < 2 and time.monotonic() - began < 10:
        one.send(0.05)
    assert len(hook.got) == 2, "the other address has both"
    goes_on.set()


@pytest.mark.parametrize(("private", "is_taken"), [(False, False), (True, True)])
def test_a_redirect_to_a_private_address_needs_permission(hook: Hook, private: bool, is_taken: bool) -> None:
    hook.answers = lambda path: (200, {}) if path == "/x" else (307, {"Location": f"{hook.url}/x"})
    notice = Notice(ALL, f"{hook.url}/moved", private=private)
    if is_taken:
        deliver(notice, b"{}", {})
    else:
        with pytest.raises(UndeliveredError, match="redirects to a private address"):
            deliver(notice, b"{}", {})
    assert len(hook.got) == is_taken


def test_a_redirect_goes_to_the_address_that_was_looked_at(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose next answer is another address leads nowhere else."""
    port = hook.server.server_address[1]
    answers = iter(["127.0.0.1", "127.0.0.2"])

    def lookup(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    hook.answers = lambda path: (
        (200, {}) if path == "/x" else (307, {"Location": f"http://rebinds.example:{port}/x"})
    )
    with monkeypatch.context() as patched:
        patched.setattr("resource_manager.rest.webhooks.socket.getaddrinfo", _by_name(lookup))
        deliver(Notice(ALL, f"{hook.url}/moved", private=True), b"{}", {})
    assert [headers["Host"] for _, headers in hook.got] == [f"rebinds.example:{port}"]
    assert next(answers) == "127.0.0.2", "it was asked once"


def _by_name(lookup: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    real = socket.getaddrinfo
    return lambda host, *more, **named: (
        lookup(host) if host == "rebinds.example" else real(host, *more, **named)
    )


@pytest.mark.parametrize(
    ("address", "is_"),
    [
        ("9.9.9.9", True),
        ("2620:fe::fe", True),
        ("::ffff:9.9.9.9", True),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_an_address_is_public_in_no_disguise(address: str, is_: bool) -> None:
    assert is_public(address) is is_


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (304, {}, "it answered 304"),
        (302, {}, "it answered 302"),
        (302, {"Location": f"http://{'a' * 70}.example/"}, "label"),
    ],
)
def test_a_redirect_that_leads_nowhere_counts_as_not_taken(
    hook: Hook, status: int, headers: dict[str, str], said: str
) -> None:
    hook.answers = lambda path: (status, headers)
    with pytest.raises(UndeliveredError, match=said):
        deliver(Notice(ALL, hook.url), b"{}", {})


def test_a_redirect_without_end_and_a_dead_address_are_one_line(hook: Hook) -> None:
    hook.answers = lambda path: (302, {"Location": f"{hook.url}/again"})
    for to, said in (
        (hook.url, "redirects more than 3 times"),
        ("http://127.0.0.1:1/", "refused"),
        ("https://hooks\u2603.example.org/", "Invalid IDNA hostname"),
    ):
        with pytest.raises(UndeliveredError, match=said):
            deliver(Notice(ALL, to, private=True), b"{}", {})


@pytest.mark.parametrize(
    "entry",
    [
        *("on = []", 'on = ["lunch"]', 'to = "ftp://a/b"', 'to = "https://me:pw@a/"', 'to = "x"'),
        *('to = "https://a:port/"', 'to = "https://a:99999/"', 'to = "https://a:0/"'),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(entry: str, tmp_path: Any) -> None:
    usual = {"on": 'on = ["idle"]', "to": 'to = "https://a.example/x"'}
    lines = [entry if entry.startswith(name) else line for name, line in usual.items()]
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join(["[[notices]]", *lines]))
    with pytest.raises(ClusterFileError, match=r"cluster.toml:\d:\d+: notices.0.(on|to)"):
        ClusterFiles([path])


SECRET = "T000/B000/hush"


def test_an_address_is_shown_by_its_host_alone_and_kept_where_it_is_applied_so(hook: Hook) -> None:
    clock = Clock()
    entry = {"on": ["quarantined"], "to": f"{hook.url}/{SECRET}"}
    manager = manager_of(clock, entry)
    shown = manager.cluster()
    [stated] = shown["sections"]["notices"]
    assert stated["to"].startswith(f"{hook.url}/***")
    told = manager.history(), manager.snapshot(), shown, manager.diff(ClusterForm())
    assert SECRET not in json.dumps(told)
    for unchanged in (entry, stated):
        assert not manager.diff(ClusterForm.model_validate({"notices": [unchanged]}))["changed"]
    manager.apply(ClusterForm.model_validate({"notices": [{**stated, "team": "vision"}]}))
    [kept] = manager.read(lambda cluster, now: cluster.settings.notices)
    assert (kept.to, kept.team) == (entry["to"], "vision")
    before = manager.cluster()["revision"]
    manager.apply(ClusterForm.model_validate({"notices": [{**entry, "to": f"{hook.url}/other"}]}))
    assert manager.cluster()["revision"] != before
    with pytest.raises(InvalidRequestError, match=r"/\*\*\*\w+ stands for an address that is not stored"):
        manager.apply(ClusterForm.model_validate({"notices": [stated]}))


def test_no_log_has_the_address(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    manager = manager_of(clock, {"on": ["quarantined"], "to": f"{hook.url}/{SECRET}"})
    quarantine(manager, clock, "t")
    hook.answers = lambda path: (500 if clock.now < 1100 else 200, {})
    one = sender(manager)
    one.send()
    clock.now += 100
    one.send()
    assert len(hook.got) == 1
    assert "not taken, attempt 1: it answered 500" in caplog.text
    assert SECRET not in caplog.text


STEPS = st.sampled_from(["event", "send 0", "send 1", "die before 0", "die after 0", "die after 1", "wait"])


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_over_deaths_of_two_services_each_event_is_sent_at_least_once_and_none_that_was_not(
    steps: list[str],
) -> None:
    clock = Clock()
    manager = manager_of(clock, {"on": ["quarantined"], "to": "http://127.0.0.1:1/"})
    [notice] = manager.read(lambda cluster, now: cluster.settings.notices)
    got: list[str] = []
    dies = {"before": False, "after": False}

    def post(notice: Notice, body: bytes, headers: Mapping[str, str]) -> None:
        if dies["before"]:
            raise Killed
        got.append(json.loads(body)["subject"].split()[0])
        if dies["after"]:
            raise Killed

    services = [sender(manager, post=post) for _ in range(2)]
    happened: list[str] = []
    for step in [*steps, "wait", "send 0"]:
        verb, _, rest = step.partition(" ")
        if verb == "event":
            happened.append(f"t{len(happened)}")
            quarantine(manager, clock, happened[-1], gpus=1, gpu_milli=100)
        elif verb == "wait":
            clock.now += CLAIM_S + 1
        else:
            number = int(rest[-1])
            dies.update(dict.fromkeys(dies, False), **({rest.split()[0]: True} if verb == "die" else {}))
            try:
                services[number].serve(notice)
            except Killed:
                services[number] = sender(manager, post=post)
    assert set(got) == set(happened)
    if not any(step.startswith("die") for step in steps):
        assert got == happened, "two services send one"


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_services_on_one_store_send_each_event_once_and_a_restart_loses_none(
    kind: str, hook: Hook, embedded_redis: RedisServer, tmp_path: Any
) -> None:
    url = embedded_redis.fresh_url() if kind == "redis" else f"sqlite:///{tmp_path}/state.db"
    definition = ClusterForm.model_validate({"notices": [{"on": list(ALL), "to": hook.url}]})
    with (
        GPUResourceManager.from_url(url, inventory=default_inventory()) as one,
        GPUResourceManager.from_url(url) as two,
    ):
        one.apply(definition)
        services = [sender(one), sender(two)]
        for gpu in range(3):
            one.drain("gpu-server-0", gpu=gpu)
            threads = [threading.Thread(target=each.send) for each in services]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        one.drain("gpu-server-0", gpu=3)
        sender(two).send()
    assert [event["subject"] for event in hook.events] == [f"GPU {gpu} of gpu-server-0" for gpu in range(4)]


def test_one_turn_sends_all_events_since_the_apply_that_named_the_address(hook: Hook) -> None:
    """Whatever else happened meanwhile: a busy store has more changes between two turns than a page has."""
    clock = Clock()
    manager = manager_of(clock, {"on": ["gpu closed"], "to": hook.url})
    manager.drain("gpu-server-0", gpu=0)
    for _ in range(PAGE // 2 + 1):
        manager.drain("gpu-server-1")
        manager.resume("gpu-server-1")
    manager.drain("gpu-server-0", gpu=1)
    sender(manager).send(20)
    assert [event["subject"] for event in hook.events] == ["GPU 0 of gpu-server-0", "GPU 1 of gpu-server-0"]


def test_a_turn_ends_before_its_claim(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that changes faster than its events are sent would keep a turn from its end."""
    clock = Clock()
    manager = manager_of(clock, {"on": ["gpu closed"], "to": hook.url})
    for gpu in range(3):
        manager.drain("gpu-server-0", gpu=gpu)
    monkeypatch.setattr("resource_manager.rest.webhooks.TURN_S", -1.0)
    one = sender(manager)
    for sent in range(1, 4):
        one.send(20)
        assert len(hook.got) == sent


def test_a_quiet_fortnight_neither_repeats_nor_loses_an_event(hook: Hook) -> None:
    clock = Clock()
    manager = manager_of(clock, {"on": ["gpu closed"], "to": hook.url})
    manager.drain("gpu-server-0", gpu=0)
    one = sender(manager)
    for _ in range(14):
        one.send(20)
        clock.now += 24 * 3600
    manager.drain("gpu-server-0", gpu=1)
    one.send(20)
    assert [event["subject"] for event in hook.events] == ["GPU 0 of gpu-server-0", "GPU 1 of gpu-server-0"]


@pytest.mark.parametrize("dies", [False, True])
def test_notices_go_on_after_the_clock_was_set_back(hook: Hook, dies: bool) -> None:
    """Else no service would send any for as long as the clock was ahead."""
    clock = Clock()
    manager = manager_of(clock, {"on": ["gpu closed"], "to": hook.url})
    [notice] = manager.read(lambda cluster, now: cluster.settings.notices)

    def post(*call: Any) -> None:
        if dies:
            raise Killed

    clock.now += 7 * 24 * 3600
    manager.drain("gpu-server-0", gpu=0)
    with suppress(Killed):
        sender(manager, post=post).serve(notice)
    clock.now -= 7 * 24 * 3600
    manager.drain("gpu-server-0", gpu=1)
    sender(manager).serve(notice)
    assert [event["subject"] for event in hook.events][-1:] == ["GPU 1 of gpu-server-0"]


@pytest.mark.parametrize(("fails", "waits_s"), [(False, 0.0), (True, FIRST_PAUSE_S + 1)])
def test_notices_wait_no_longer_than_their_pause_while_the_clock_is_set_back(
    hook: Hook, fails: bool, waits_s: float
) -> None:
    """They waited up to ten minutes, also at an address that took all before."""
    clock = Clock()
    manager = manager_of(clock, {"on": ["gpu closed"], "to": hook.url})
    [notice] = manager.read(lambda cluster, now: cluster.settings.notices)
    hook.answers = lambda path: (500 if fails else 200, {})
    manager.drain("gpu-server-0", gpu=0)
    sender(manager).serve(notice)
    clock.now -= 500
    hook.answers = lambda path: (200, {})
    manager.drain("gpu-server-0", gpu=1)
    clock.now += waits_s
    sender(manager).serve(notice)
    assert [event["subject"] for event in hook.events][-1:] == ["GPU 1 of gpu-server-0"]


def test_an_address_that_is_named_again_has_the_events_after_that(hook: Hook) -> None:
    clock = Clock()
    entry = {"on": ["gpu closed"], "to": hook.url}
    manager = manager_of(clock, entry)
    manager.drain("gpu-server-0", gpu=0)
    manager.apply(ClusterForm(), ApplyOptions(remove=("notices",)))
    manager.apply(ClusterForm.model_validate({"notices": [entry]}))
    manager.drain("gpu-server-0", gpu=1)
    sender(manager).send(20)
    assert [event["subject"] for event in hook.events] == ["GPU 1 of gpu-server-0"]
