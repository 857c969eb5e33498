"""`LeaseService`: one contract for the manager on a store, the client of a service, and asyncio.

A test that fails for one of them is a difference that a caller would have to ask for.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resource_manager import AsyncGPUResourceManager, Demand, GPUResourceManager, Refusal
from resource_manager.core.changes import JobEnd
from resource_manager.core.models import Gpu, JobPlace
from resource_manager.errors import (
    AmbiguousNameError,
    DuplicateTaskError,
    InvalidRequestError,
    JobPlacedError,
    LeaseNotFoundError,
    LockTimeoutError,
    NeverFitsError,
    NotPreemptibleError,
    ResourceManagerError,
    ServerInUseError,
    UnknownNodeError,
)
from resource_manager.fleet.opening import REPORTS
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.original import OriginalNames
from resource_manager.manager.results import ReleaseResult, Renewal
from resource_manager.rest.client import ServiceClient
from tests.builders import granted_lease, present
from tests.listening import served

METHODS = {
    name
    for kind in (LeaseService, OriginalNames)
    for name, _ in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_")
}


class Awaited:
    """The asyncio form as the plain methods that a test calls."""

    def __init__(self, face: AsyncGPUResourceManager, loop: asyncio.AbstractEventLoop) -> None:
        self._face, self._loop = face, loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._face, name)
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))


SERVERS = [replace(node, address=f"10.0.0.{node.server_id}") for node in default_inventory(2)]


def on_store(url: str) -> GPUResourceManager:
    manager = GPUResourceManager.from_url(url, inventory=SERVERS)
    manager.read_reports_by(REPORTS)
    return manager


@contextmanager
def over_http(url: str, folder: Path) -> Iterator[ServiceClient]:
    """Yield a client of a service that listens on a port of this machine."""
    with on_store(url) as manager, served(manager, folder, 4) as address, ServiceClient(address) as client:
        yield client


@contextmanager
def awaited(url: str) -> Iterator[Any]:
    with closing(asyncio.new_event_loop()) as loop:
        face = AsyncGPUResourceManager(on_store(url))
        yield Awaited(face, loop)
        loop.run_until_complete(face.close())


WAYS = ("redis", "sqlite", "http", "asyncio")


@pytest.fixture(params=WAYS)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LeaseService]:
    """A service of two servers with 8 GPUs each."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'state.db'}"
    else:
        url = request.getfixturevalue("embedded_redis").fresh_url()
    with ExitStack() as stack:
        if request.param == "http":
            yield stack.enter_context(over_http(url, tmp_path))
        elif request.param == "asyncio":
            yield stack.enter_context(awaited(url))
        else:
            yield stack.enter_context(on_store(url))


@pytest.mark.parametrize("kind", [GPUResourceManager, ServiceClient, AsyncGPUResourceManager])
def test_every_way_has_every_method_with_the_same_parameters(kind: type) -> None:
    for name in METHODS - {"close"}:
        wanted = inspect.signature(getattr(LeaseService, name, None) or getattr(OriginalNames, name))
        found = inspect.signature(getattr(kind, name)).parameters
        for parameter in wanted.parameters:
            assert parameter in found, f"{kind.__name__}.{name} lacks {parameter}"
            assert found[parameter].default == wanted.parameters[parameter].default, f"{name}: {parameter}"
        more = [each for each in found.values() if each.name not in wanted.parameters]
        assert all(each.default is not each.empty for each in more), f"{kind.__name__}.{name} needs more"


def test_a_lease_is_granted_renewed_and_released(service: LeaseService) -> None:
    lease = service.try_allocate("t", 2, cpus=4, labels={"dag_id": "d"})
    assert not isinstance(lease, Refusal)
    assert (lease["state"], lease["gpu_ids"], lease["cpu_count"]) == ("RUNNING", [0, 1], 4)
    assert service.status_of("t") == lease == service.named(lease["short_id"], pending=False)
    assert service.leases() == [lease]
    renewed = service.renew("t", fencing_token=lease["fencing_token"], checkpoint_at=lease["granted_at"])
    assert renewed["checkpoint_at"] == lease["granted_at"]
    assert service.release("t", fencing_token=lease["fencing_token"] + 1) is ReleaseResult.OTHER_HOLDER
    assert service.release("t", outcome="SUCCESS") is ReleaseResult.RELEASED
    assert service.release("t") is ReleaseResult.NOT_HELD
    assert service.status_of("t") is None
    assert service.leases() == []


def test_a_lease_is_renewed_once_for_longer_than_its_ttl(service: LeaseService) -> None:
    lease = granted_lease(service.submit("t", 2, ttl=60))
    token = lease["fencing_token"]
    ends_at = present(lease["expires_at"])
    longer = present(service.renew("t", fencing_token=token, for_s=600)["expires_at"])
    assert 539 < longer - ends_at < 600
    shorter = present(service.renew("t", fencing_token=token, for_s=1)["expires_at"])
    assert shorter < longer - 500, "no shorter than ttl"
    assert ends_at <= present(service.renew("t")["expires_at"]) < longer - 500


def test_a_whole_demand_stands_in_the_place_of_its_fields(service: LeaseService) -> None:
    lease = service.submit(Demand(lease_id="t", gpus=3, priority=2))
    assert (lease["task_id"], lease["state"], lease["priority"]) == ("t", "RUNNING", 2)


def test_a_refusal_is_a_value_with_a_kind_and_a_reason(service: LeaseService) -> None:
    service.submit("a", 8)
    service.submit("b", 8)
    refused = service.try_allocate("c", 2)
    assert isinstance(refused, Refusal)
    assert refused.kind == "no_capacity"
    assert refused.detail == service.explain("c", 2)["reason"]
    assert refused.detail == service.explain(gpus=2)["reason"], "no lease need be named"
    never = service.try_allocate("d", 2, gpu_types=["H900"])
    assert isinstance(never, Refusal)
    assert never.kind == "never_fits"


def test_each_of_a_batch_is_granted_or_refused_by_itself(service: LeaseService) -> None:
    service.submit("taken", 2)
    answers = service.try_allocate_batch(
        [{"lease_id": "a", "gpus": 8}, Demand(lease_id="b", gpus=8), {"lease_id": "taken", "gpus": 4}]
    )
    kinds = [each.kind if isinstance(each, Refusal) else each["task_id"] for each in answers]
    assert kinds == ["a", "no_capacity", "task_taken"]
    assert service.try_allocate_batch([]) == []


def test_a_queued_request_is_granted_when_it_fits(service: LeaseService) -> None:
    service.submit("a", 8)
    service.submit("b", 8)
    waits = service.submit("c", 8, priority=3)
    assert (waits["state"], waits["position"]) == ("WAITING", 1)  # type: ignore[typeddict-item]
    [entry] = service.queue()
    assert entry["task_id"] == "c"
    assert entry["estimated_start"]["confidence"]
    assert [each["task_id"] for each in service.queue(estimated=False)] == ["c"]
    assert service.explain_named("c")["kind"] == entry["kind"]
    found = service.wait("c", 0.0)
    assert found is not None
    assert found["state"] == "WAITING"
    service.release("a")
    found = service.wait("c", 30.0)
    assert found is not None
    assert found["state"] == "RUNNING"


def test_a_queued_request_is_cancelled_by_its_number(service: LeaseService) -> None:
    for name in "abc":
        service.submit(name, 8)
    sequence = service.queue()[0]["sequence"]
    assert not service.cancel("c", sequence=sequence + 1)
    assert service.cancel("c", sequence=sequence, reason="no longer wanted")
    assert not service.cancel("c")
    assert service.queue() == []
    assert service.wait("c", 30.0) is None


def test_a_lease_is_taken_for_who_waits(service: LeaseService) -> None:
    service.submit("a", 8, preemptible=True)
    service.submit("b", 8)
    with pytest.raises(NotPreemptibleError):
        service.preempt("a")
    service.submit("c", 8, priority=5)
    assert service.preempt("a", dry_run=True)["preempted_by"] == "c"
    assert service.preempting() == []
    taken = service.preempt("a", preemptor="c")
    assert (taken["state"], taken["preempted_by"]) == ("PREEMPTING", "c")
    assert [each["task_id"] for each in service.preempting()] == ["a"]


def test_a_placed_job_is_ended_by_who_knows_that_it_is_gone(service: LeaseService) -> None:
    lease = service.submit("t", 2)
    token = lease["fencing_token"]  # type: ignore[typeddict-item]
    placed = service.place_job("t", [JobPlace("local", "gpu-server-0")], fencing_token=token)
    assert placed["job_places"][0]["launcher"] == "local"
    with pytest.raises(JobPlacedError):
        service.release("t", fencing_token=token)
    forced = service.release("t", fencing_token=token, job_end=JobEnd.FORCED, reason="its disk failed")
    assert forced is ReleaseResult.QUARANTINED
    gone = service.release("t", fencing_token=token, job_end=JobEnd.GONE, reason="pulled the plug")
    assert gone is ReleaseResult.RELEASED


def test_members_of_a_gang_end_one_by_one(service: LeaseService) -> None:
    lease = service.submit("t", 4, nodes=2)
    token = lease["fencing_token"]  # type: ignore[typeddict-item]
    assert len(lease["members"]) == 2  # type: ignore[typeddict-item]
    assert service.release_members("t", [1], fencing_token=token) is ReleaseResult.RELEASED
    assert [each["quarantined"] for each in service.leases()] == [True]
    assert service.release_members("t", [0], fencing_token=token) is ReleaseResult.RELEASED
    assert service.leases() == []


WRONG = {"lease_id": "b", "gpus": 1, "types": "x"}

ERRORS: list[tuple[type[Exception], str | None, Callable[[LeaseService], object]]] = [
    (InvalidRequestError, "gpus", lambda service: service.submit("t", 99)),
    (InvalidRequestError, "cpus", lambda service: service.try_allocate("t", 2, 999)),
    (InvalidRequestError, "vendor", lambda service: service.submit("t", 2, vendor="a\nb")),
    (InvalidRequestError, "gpu_milli", lambda service: service.submit("t", 2, gpu_milli=500)),
    (InvalidRequestError, "gpu", lambda service: service.drain(0, gpu=99)),
    (InvalidRequestError, "by.0", lambda service: service.report(by=["colour"])),
    (NeverFitsError, None, lambda service: service.submit("t", 2, gpu_types=["H900"])),
    (UnknownNodeError, "server", lambda service: service.submit("t", 2, server="nowhere")),
    (UnknownNodeError, "prefer_server", lambda service: service.explain("t", 2, prefer_server=9)),
    (UnknownNodeError, None, lambda service: service.drain("nowhere")),
    (DuplicateTaskError, None, lambda service: service.submit("held", 3)),
    (LeaseNotFoundError, None, lambda service: service.renew("nobody")),
    (InvalidRequestError, "for_s", lambda service: service.renew("held", for_s=0)),
    (InvalidRequestError, "for_s", lambda service: service.renew("held", for_s=86_401)),
    (InvalidRequestError, "for_s", lambda service: service.renew("held", for_s="x")),  # type: ignore[arg-type]
    (InvalidRequestError, "checkpoint_at", lambda service: service.renew("held", checkpoint_at="x")),  # type: ignore[arg-type]
    (InvalidRequestError, "reason", lambda service: service.cancel("held", reason=5)),  # type: ignore[arg-type]
    (InvalidRequestError, "labels", lambda service: service.submit("t", 2, labels={5: 6})),  # type: ignore[dict-item]
    (InvalidRequestError, "ttl", lambda service: service.submit("t", 2, ttl=True)),
    (LeaseNotFoundError, None, lambda service: service.named("nobody")),
    (LeaseNotFoundError, None, lambda service: service.preempt("nobody")),
    (LeaseNotFoundError, None, lambda service: service.job_output("gpu-server-0", "k", 0)),
    (ServerInUseError, None, lambda service: service.adopt(0, [])),
    (InvalidRequestError, "by", lambda service: service.report(by=[])),
    (
        InvalidRequestError,
        "requests.1.types",
        lambda service: service.try_allocate_batch([{"lease_id": "a", "gpus": 1}, WRONG]),
    ),
    (
        InvalidRequestError,
        "requests.0.gpus",
        lambda service: service.try_allocate_batch([{"lease_id": "a", "gpus": 99}]),
    ),
]


def test_a_wrong_value_is_told_in_the_same_words(service: LeaseService) -> None:
    for act, words in (
        (lambda: service.submit("t", 1.5), "gpus must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: service.try_allocate_batch([WRONG]), "requests.0.types must be 'first' or 'best', got 'x'"),
        (
            lambda: service.report(by=["x"]),
            "by.0 must be 'team', 'user', 'dag', 'gpu_type' or 'source', got 'x'",
        ),
        (lambda: service.job_output("gpu-server-0", "k", 0), "no lease on gpu-server-0 has the job k"),
    ):
        with pytest.raises(ResourceManagerError) as caught:
            act()
        assert str(caught.value) == words


def test_errors_are_the_same(service: LeaseService) -> None:
    service.submit("held", 2)
    for kind, field, act in ERRORS:
        with pytest.raises(kind) as caught:
            act(service)
        if field is not None:
            assert caught.value.field == field  # type: ignore[attr-defined]
    assert [each["task_id"] for each in service.leases()] == ["held"]
    assert service.queue() == []


def test_a_name_that_several_have_is_the_same_error(service: LeaseService) -> None:
    for lease_id in ("i:d/r1/t", "i:d/r2/t"):
        service.submit(lease_id, 2, labels={"dag_id": "d", "run_id": lease_id[4:6], "task_id": "t"})
    with pytest.raises(AmbiguousNameError, match=r"'d\.t' names 2: d\.t \w{4}, d\.t \w{4}; say which"):
        service.named("d.t")


def test_servers_are_drained_resumed_and_adopted(service: LeaseService) -> None:
    names = [each["server_name"] for each in service.servers()]
    assert (
        names
        == ["gpu-server-0", "gpu-server-1"]
        == [each["server_name"] for each in service.summary()["servers"]]
    )
    assert service.drain("gpu-server-0", reason="fan")["drain_reason"] == "fan"
    assert service.try_allocate("t", 2)["server_name"] == "gpu-server-1"  # type: ignore[index]
    assert service.resume("0")["drained"] is False
    assert service.drain(0, gpu=3)["closed_gpus"] == 1
    assert service.resume("gpu-server-0", gpu=3)["closed_gpus"] == 0
    service.release("t")
    assert [gpu["uuid"] for gpu in service.adopt(1, [Gpu(0), Gpu(1)])["gpus"]] == ["", ""]
    adopted = service.adopt(0, [Gpu(0, uuid="GPU-0"), Gpu(1, uuid="GPU-1")])
    assert [gpu["uuid"] for gpu in adopted["gpus"]] == ["GPU-0", "GPU-1"]
    assert service.server("gpu-server-0") == adopted
    assert service.searched(1, ["gpu-t-0a1b2c3d-7"], age_s=1.5)["server_name"] == "gpu-server-1"


def test_the_use_of_gpus_names_the_leases_on_them(service: LeaseService) -> None:
    service.submit("t", 2, team="vision")
    first, second = service.gpus()
    assert [gpu["leases"][0]["team"] for gpu in first["gpus"][:2]] == ["vision", "vision"]
    assert first["age_s"] is None, "no agent reports here"
    assert service.gpus([second["server_name"]]) == [second]


def test_the_cluster_is_what_was_applied(service: LeaseService) -> None:
    form = ClusterForm.model_validate({"cluster": {"policy": "best_fit"}})
    shown = service.diff(form)
    assert shown["changed"]
    assert service.apply(form, revision=shown["revision"])["lines"] == shown["lines"]
    assert not service.diff(form)["changed"]
    assert 'policy = "best_fit"' in service.cluster()["toml"]
    assert service.teams()["teams"] == []


def test_maintenance_is_added_and_removed(service: LeaseService) -> None:
    times = {"from": "2099-01-01T00:00:00Z", "until": "2099-01-01T04:00:00Z"}
    asked = WindowForm.of(servers=["gpu-server-0"], **times)
    assert service.add_maintenance(asked, dry_run=True)["servers"] == ["gpu-server-0"]
    assert service.maintenance() == []
    made = service.add_maintenance(asked)
    assert [each["id"] for each in service.maintenance()] == [made["id"]]
    removed = service.remove_maintenance(made["id"])
    assert removed is not None
    assert removed["id"] == made["id"]
    assert service.remove_maintenance(made["id"]) is None


def test_history_and_report_tell_what_was(service: LeaseService) -> None:
    service.submit("t", 2)
    service.release("t", outcome="SUCCESS")
    changes = service.history()
    assert [each["change"] for each in changes[-2:]] == ["granted", "released"]
    assert service.history(after=changes[-2]["version"]) == changes[-1:]
    assert [each["change"] for each in service.history(what="release")] == ["released"]
    assert service.report(by=["team"], since="1h")["total"]["leases"] == 1


def test_estimates_are_told_with_their_outcomes(service: LeaseService) -> None:
    assert service.estimates() == {"kinds": [], "started": []}
    service.submit("first", 8, server="gpu-server-0", expected_runtime=1200)
    service.submit("waits", 8, server="gpu-server-0")
    service.queue()
    service.release("first")
    service.submit("next", 8, server="gpu-server-0")
    service.queue()
    found = service.estimates()
    [started] = found["started"]
    assert (started["task_id"], started["name"][:-4], started["inside"]) == ("waits", "waits ", False)
    assert [each["kind"] for each in found["kinds"]] == ["all", "within an hour"]
    assert found["kinds"][0]["median_error_s"] == pytest.approx(1200, abs=60)


def test_who_asks_may_end_what_is_theirs(service: LeaseService) -> None:
    lease = service.submit("t", 2)
    service.require_owner(lease)
    assert service.stated_owner("ada") in ("ada", None)


def test_a_reset_leaves_the_cluster(service: LeaseService) -> None:
    service.submit("t", 2)
    service.drain("gpu-server-0", reason="broken fan", failed=True)
    service.drain("gpu-server-1", 2, reason="ecc")
    before = service.servers()
    service.reset()
    assert service.expire_and_schedule() == []
    assert service.leases() == []
    closed = [(server["drained"], server["drain_reason"], server["gpus_closed"]) for server in before]
    assert [len(gpus) for _, _, gpus in closed] == [0, 1]
    assert closed == [
        (server["drained"], server["drain_reason"], server["gpus_closed"]) for server in service.servers()
    ]


def test_the_originals_names_answer_as_the_original_says(service: OriginalNames) -> None:
    lease = service.allocate_resources("t", 2, 4, "gpu-server-1")  # type: ignore[misc]
    assert lease is not None
    assert (lease["server_id"], lease["gpu_devices"]) == (1, "0,1")
    assert service.allocate_resources("u", 8, 64, priority=1) is not None  # type: ignore[misc]
    assert service.allocate_resources("v", 8, 64) is None  # type: ignore[misc]
    assert service.allocate_batch([{"task_id": "v", "required_gpus": 8, "required_cpus": 1}]) == [None]  # type: ignore[misc]
    with pytest.raises(InvalidRequestError, match="required_gpus must be between") as caught:
        service.allocate_resources("w", 99, 1)  # type: ignore[misc]
    assert caught.value.field == "required_gpus"
    assert service.get_resource_summary()["leases"] == 2  # type: ignore[misc]
    assert service.release_resources("t", fencing_token=9) is False  # type: ignore[misc]
    assert service.release_resources("t", outcome="SUCCESS") is True  # type: ignore[misc]
    assert service.reset_resources() is True  # type: ignore[misc]
    assert service.get_resource_summary()["leases"] == 0  # type: ignore[misc]


def test_a_busy_lock_is_the_same_error_everywhere(
    service: LeaseService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits goes on to wait: it is no refusal, and nothing was changed."""
    from resource_manager.manager.commit.protocol import Transactions

    def busy(self: Transactions, *args: object, **options: object) -> None:
        raise LockTimeoutError(0.5)

    service.submit("t", 2)
    with monkeypatch.context() as patched:
        patched.setattr(Transactions, "run", busy)
        with pytest.raises(LockTimeoutError):
            service.renew("t")
        with pytest.raises(LockTimeoutError):
            service.release("t")
        refused = service.try_allocate("u", 2)
        assert isinstance(refused, Refusal)
        assert refused.kind == "lock_busy"
        assert service.release_resources("t") is False  # type: ignore[attr-defined]
    assert [each["task_id"] for each in service.leases()] == ["t"]


def test_changes_of_leases_are_told_once_there_are_any(service: LeaseService) -> None:
    service.submit("a:runs", 8)
    service.submit("b:other", 8)
    service.submit("a:waits", 8)
    first = service.lease_changes(prefix="a:")
    assert first["is_whole"]
    assert ([each["task_id"] for each in first["leases"]], first["pending"]) == (["a:runs"], ["a:waits"])
    service.renew("a:runs")
    service.release("b:other")
    found = service.lease_changes(first["version"], 5.0, "a:")
    assert not found["is_whole"]
    assert [each["task_id"] for each in found["leases"]] == ["a:waits"]
    assert service.lease_changes(found["version"], 0.3, "a:") == {
        "version": found["version"],
        "is_whole": False,
        "leases": [],
        "pending": [],
        "ended": [],
    }
    service.release("a:runs")
    service.submit("a:waits too", 8, nodes=2)
    found = service.lease_changes(found["version"], 5.0, "a:")
    assert (found["ended"], found["pending"], found["leases"]) == (["a:runs"], ["a:waits too"], [])
    service.reset()
    found = service.lease_changes(found["version"], 5.0, "a:")
    assert (found["is_whole"], found["leases"], found["pending"]) == (True, [], [])


def test_an_announced_demand_is_no_change_of_a_lease(service: LeaseService) -> None:
    service.submit("a:runs", 8)
    first = service.lease_changes(prefix="a:")
    service.announce("a:later", 2)
    service.withdraw(["a:later"])
    found = service.lease_changes(first["version"], 0.3, "a:")
    assert (found["version"] > first["version"], found["ended"]) == (True, [])


def test_several_leases_are_renewed_at_once(service: LeaseService) -> None:
    leases = [service.submit(name, 2, ttl=60) for name in ("x", "y", "z")]
    assert service.release("y") is ReleaseResult.RELEASED
    asked: list[Renewal] = [
        {"task_id": each["task_id"], "fencing_token": each["fencing_token"], "checkpoint_at": 5.0}  # type: ignore[typeddict-item]
        for each in leases
    ]
    asked[2]["fencing_token"] += 1
    assert service.renew_all(asked) == [True, False, False]
    assert [each["checkpoint_at"] for each in service.leases()] == [5.0, None]
