"""Reports against the state: what each closes, opens, cleans or refuses, and what silence does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore
from resource_manager.agent.report_format import ReportError, read_report
from resource_manager.cli import tables
from resource_manager.core.changes import (
    AgentLost,
    Change,
    ClusterSettingsChanged,
    InventoryChanged,
    Quarantined,
)
from resource_manager.core.cluster_settings import HealthRule
from resource_manager.core.models import Gpu, Node
from resource_manager.core.names import short_id
from resource_manager.errors import UnknownNodeError
from resource_manager.fleet.receiving import ReportAnswer, ReportReceiver
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.settings import Settings
from resource_manager.storage.base import Store
from resource_manager.storage.reports import MemoryReports
from tests.agent.reporting import as_text, gpu, process, report, server, uuid
from tests.builders import Clock, granted_lease


class Service:
    """Manager and receiver on a clock of the test; time passes by ten seconds before each report."""

    def __init__(self, *nodes: Node, store: Store | None = None, **settings: Any) -> None:
        self.clock = Clock()
        self.clock.now = 1e6 if store is None else time.time() - 60.0
        self.manager = GPUResourceManager(
            Settings(store="memory://"),
            cluster=settings,
            store=store or MemoryStore(clock=self.clock),
            inventory=nodes,
        )
        self.receiver = ReportReceiver(self.manager)

    def pass_time(self, seconds: float) -> list[str]:
        """Let the time pass in which the service looks every five seconds; return the agents it loses."""
        lost: list[str] = []
        for _ in range(int(seconds // 5)):
            self.clock.now += 5
            lost += [change.node for change in self.receiver.note_silence() if isinstance(change, AgentLost)]
        self.clock.now += seconds % 5
        return lost

    def report(self, *gpus: dict[str, Any], after_s: float = 10.0, **known: Any) -> ReportAnswer:
        self.clock.now += after_s
        return self.send(report(self.clock.now, *gpus, **known))

    def send(self, value: dict[str, Any]) -> ReportAnswer:
        self.manager.read(lambda cluster, now: None)  # a test is faster than the age that a replica may have
        text = as_text(value)
        return self.receiver.receive(read_report(text))

    def allocate(self, task: str, gpus: int = 1, **more: Any) -> dict[str, Any]:
        lease = self.manager.allocate_resources(task, gpus, 1, **more)
        assert lease is not None
        return dict(lease)

    @property
    def server(self) -> dict[str, Any]:
        return dict(self.manager.get_resource_summary()["servers"][0])

    @property
    def closed(self) -> dict[int, str]:
        return {each["gpu_id"]: each["reason"] for each in self.server["gpus_closed"]}

    @property
    def kinds(self) -> list[str]:
        return [str(entry["change"]) for entry in self.manager.history()]


@pytest.fixture
def service() -> Service:
    return Service(server())


def test_a_first_report_makes_the_server_watched_and_the_next_ones_change_nothing(service: Service) -> None:
    assert service.report(gpu(0), gpu(1))["watched"]
    version = service.server["watched"], service.manager.get_resource_summary()["version"]
    for _ in range(3):
        answer = service.report(gpu(0), gpu(1))
    assert answer == {"server": "gpu-a", "watched": True, "cleaning": []}
    assert (service.server["watched"], service.manager.get_resource_summary()["version"]) == version
    assert service.manager.store.reports.reports(["gpu-a"]).keys() == {"gpu-a"}


def test_a_server_that_has_just_become_watched_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who looks for silent agents in that moment finds no record of it yet."""
    pair = Service(server(), second())
    for _ in range(20):
        pair.report(gpu(8), gpu(9), name="gpu-b", after_s=0)
        assert pair.pass_time(10) == []
    lost: list[Change] = []
    decide = pair.manager.decide

    def decide_and_look(*given: Any, **more: Any) -> Any:
        answer = decide(*given, **more)
        monkeypatch.undo()
        lost.extend(pair.receiver.note_silence())
        return answer

    monkeypatch.setattr(pair.manager, "decide", decide_and_look)
    assert pair.report(gpu(0), gpu(1))["watched"]
    assert lost == []


def test_reports_of_a_server_without_pinned_uuids_are_only_kept() -> None:
    unpinned = Service(Node("gpu-a", 0, {"cpus": 4}, tuple(type(g)(g.gpu_id) for g in server().gpus)))
    assert not unpinned.report(gpu(0, xids=[{"xid": 79, "count": 1, "at": 1.0}]))["watched"]
    assert unpinned.kinds == []
    assert unpinned.manager.store.reports.reports(["gpu-a"])


def test_a_freed_gpu_is_granted_once_no_process_of_its_lease_is_left(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    lease = service.allocate("t", 2)
    running = process(lease_id="t", lease_source="environment")
    service.report(gpu(0, processes=[running]), gpu(1, processes=[running]))
    assert service.closed == {}, "its own job is no rogue process"
    service.manager.release_resources("t")
    assert service.manager.submit("next", 2, 1)["state"] == "WAITING"
    refusal = service.manager.allocate("other", 1)
    assert isinstance(refusal, Refusal)
    answer = service.report(gpu(0, processes=[running]), gpu(1), after_s=0.5)
    assert [each["gpu_id"] for each in answer["cleaning"]] == [0]
    assert answer["next_s"] == 0.5
    assert "next" in {entry["task_id"] for entry in service.manager.queue()}
    child = process(job=f"gpu-t-0a1b2c3d-{lease['fencing_token']}.1", lease_source="cgroup")
    service.report(gpu(0, processes=[child]), gpu(1), after_s=0.5)
    assert service.manager.queue(), "a child in the job's cgroup is of the lease, too"
    service.report(gpu(0), gpu(1), after_s=0.5)
    assert [each["task_id"] for each in service.manager.leases()] == ["next"]


def test_the_next_lease_of_the_same_id_does_not_hide_processes_of_the_last(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    first = service.allocate("t")
    service.manager.release_resources("t")
    second = service.allocate("t")
    assert (first["gpu_ids"], second["gpu_ids"]) == ([0], [1])
    old = process(job=f"gpu-t-0a1b2c3d-{first['fencing_token']}", lease_source="cgroup")
    service.report(gpu(0, processes=[old]), gpu(1))
    assert [each["gpu_id"] for each in service.server["gpus_cleaning"]] == [0]


def test_what_is_not_clean_in_time_is_closed_with_its_processes_and_recovers(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    service.allocate("t")
    service.manager.release_resources("t")
    stays = process(4711, lease_id="t", lease_source="ancestor")
    service.report(gpu(0, processes=[stays]), gpu(1), after_s=59)
    assert service.closed == {}
    service.report(gpu(0, processes=[stays]), gpu(1), after_s=2)
    assert service.closed == {
        0: f"not cleaned; lease t {short_id(1)} (token 1), which ended at 1970-01-12T13:46Z: "
        "pid 4711 of eve: python mine.py"
    }
    for _ in range(3):
        assert 0 in service.closed
        service.report(gpu(0), gpu(1))
    assert service.closed == {}
    assert service.server["available_gpus"] == 2


@pytest.fixture
def pair() -> Service:
    """Two servers whose agents report."""
    service = Service(server(), second())
    service.report(gpu(0), gpu(1))
    service.report(gpu(8), gpu(9), name="gpu-b", after_s=0)
    service.receiver.note_silence()
    return service


def second(name: str = "gpu-b", number: int = 1) -> Node:
    gpus = tuple(Gpu(n, "A100", uuid=uuid(8 * number + n)) for n in range(2))
    return Node(name, number, {"cpus": 64}, gpus)


def report_b(pair: Service, seconds: float) -> list[str]:
    """Let time pass in which the second server reports every ten seconds; return the agents that are lost."""
    lost = []
    for _ in range(int(seconds // 10)):
        pair.report(gpu(8), gpu(9), name="gpu-b")
        lost += [change.node for change in pair.receiver.note_silence() if isinstance(change, AgentLost)]
    return lost


def test_a_silent_server_takes_no_new_leases_until_its_agent_reports(pair: Service) -> None:
    pair.allocate("t", 2, server="gpu-a")
    assert report_b(pair, 50) == []
    assert report_b(pair, 20) == ["gpu-a"]
    assert report_b(pair, 20) == [], "once"
    row = pair.server
    assert (row["state"], row["silent_since"], row["closed_gpus"]) == ("ERROR", 1e6 + 10, 0)
    console = tables.console(wide=True)
    with console.capture() as shown:
        console.print(tables.status(pair.manager.summary(), [], []))
    assert "silent since 1970-01-12T13:46Z" in shown.get()
    assert pair.manager.status_of("t")["state"] == "RUNNING", "its leases stay"  # type: ignore[index]
    refusal = pair.manager.allocate("u", 1, 1, server="gpu-a")
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "no_capacity"
    assert refusal.detail == "gpu-a has 0 free but has been silent since 1970-01-12T13:46Z"
    assert pair.manager.explain("u", 1, 1)["servers"][0]["reasons"] == [
        "has been silent since 1970-01-12T13:46Z"
    ]
    pair.allocate("u", 2)
    pair.manager.submit("v", 2, 1)
    pair.manager.release_resources("t")
    pair.report(gpu(0), gpu(1))
    assert pair.server["silent_since"] is None
    assert granted_lease(pair.manager.status_of("v"))["server_name"] == "gpu-a"
    assert pair.kinds[-4:] == ["agentseen", "gpucleaned", "gpucleaned", "granted"]


def test_a_queued_request_is_told_which_silent_server_could_take_it(pair: Service) -> None:
    report_b(pair, 80)
    pair.allocate("t", 2)
    pair.manager.submit("u", 2, 1)
    [entry] = pair.manager.queue()
    assert (entry["kind"], entry["reason"]) == (
        "no_capacity",
        "no server with 2 GPUs: none is free anywhere; gpu-a has 2 free but has been silent since "
        "1970-01-12T13:46Z",
    )


def test_an_agent_whose_driver_hangs_is_as_good_as_silent(pair: Service) -> None:
    for _ in range(8):
        pair.report(error="the GPU driver hangs", after_s=0.5)
        report_b(pair, 10)
    assert pair.server["silent_since"] == 1e6 + 10


@pytest.mark.parametrize("error", [None, "no GPU library or tool"])
def test_the_silence_of_a_server_without_gpus_is_noticed(error: str | None) -> None:
    service = Service(Node("gpu-a", 0, {"cpus": 8}), second(), min_gpus=0)
    for _ in range(3):
        service.report(error=error)
        report_b(service, 10)
    assert (service.server["watched"], service.kinds) == (True, ["agentseen", "agentseen"])
    service.allocate("t", 0, server="gpu-a")
    report_b(service, 80)
    assert service.server["silent_since"] is not None
    refused = service.manager.allocate("u", 0, 1, server="gpu-a")
    assert isinstance(refused, Refusal)
    assert "silent" in refused.detail
    service.report(error=error)
    assert service.server["silent_since"] is None
    service.manager.release_resources("t")
    service.allocate("u", 0, server="gpu-a")


@pytest.mark.parametrize("is_granted_before", [True, False])
def test_gpus_whose_uuids_left_the_inventory_are_granted_again(is_granted_before: bool) -> None:
    service = Service(server())
    service.report(gpu(0), gpu(1))

    def unpin() -> None:
        node = service.manager.inventory[0]
        unpinned = replace(node, gpus=tuple(replace(each, uuid="") for each in node.gpus))
        service.manager.commit(lambda cluster, now: [InventoryChanged((unpinned,), now)])

    if is_granted_before:
        service.allocate("t", 2)
        unpin()
    else:
        unpin()
        service.allocate("t", 2)
    service.manager.release_resources("t")
    left = process(lease_id="t", lease_source="environment")
    service.report(gpu(0, processes=[left]), gpu(1))
    assert [entry["gpu_id"] for entry in service.server["gpus_cleaning"]] == [0] * is_granted_before
    service.report(gpu(0), gpu(1))
    service.allocate("u", 2)


def test_what_is_released_on_a_silent_server_is_cleaned_before_it_is_granted_again(pair: Service) -> None:
    pair.allocate("t", 2, server="gpu-a")
    report_b(pair, 80)
    pair.manager.release_resources("t")
    left = process(lease_id="t", lease_source="environment")
    pair.report(gpu(0, processes=[left]), gpu(1))
    assert pair.server["available_gpus"] == 1
    assert [entry["gpu_id"] for entry in pair.server["gpus_cleaning"]] == [0]


def test_a_lost_agent_leaves_gpus_uncleaned_until_somebody_confirms(pair: Service) -> None:
    pair.allocate("t", 2, server="gpu-a")
    pair.manager.release_resources("t")
    assert report_b(pair, 80) == ["gpu-a"]
    assert "gpu-a" not in pair.manager.store.reports.reports(["gpu-a"])
    assert pair.manager.resume("gpu-a")["available_gpus"] == 0
    assert pair.manager.resume("gpu-a", 1)["available_gpus"] == 1, "an operator confirms"
    pair.report(gpu(0), gpu(1))
    assert pair.server["available_gpus"] == 2, "an agent confirms"


def test_an_operator_who_removed_an_agent_resumes_its_server(pair: Service) -> None:
    report_b(pair, 80)
    row = pair.manager.resume("gpu-a")
    assert (row["silent_since"], row["watched"], row["available_gpus"]) == (None, False, 2)
    assert report_b(pair, 200) == [], "it has no agent that could be silent"
    pair.report(gpu(0), gpu(1))
    assert pair.server["watched"]


def test_what_a_report_shows_is_by_its_agent_and_silence_by_nobody(pair: Service) -> None:
    pair.report(gpu(0), gpu(1, lost=True))
    report_b(pair, 100)
    found = [(entry["change"], entry["node"], entry.get("by")) for entry in pair.manager.history()]
    assert ("gpuclosed", "gpu-a", "agent:gpu-a") in found
    assert ("agentlost", "gpu-a", None) in found
    assert {by for change, _, by in found if change != "agentlost"} == {"agent:gpu-a", "agent:gpu-b"}


def test_an_agent_that_reports_rarely_is_given_three_of_its_intervals(pair: Service) -> None:
    pair.report(gpu(0), gpu(1), interval_s=40.0)
    assert report_b(pair, 110) == []
    assert report_b(pair, 20) == ["gpu-a"]


def test_silence_counts_from_the_first_look_of_a_service_that_has_received_a_report(pair: Service) -> None:
    """Records of before it started say nothing: agents may have sent reports that nobody took."""
    pair.clock.now += 3600
    pair.receiver = ReportReceiver(pair.manager)
    assert pair.pass_time(300) == [], "a process that receives nothing finds nobody silent"
    assert report_b(pair, 60) == []
    assert report_b(pair, 10) == ["gpu-a"]


def test_after_a_pause_of_the_service_silence_counts_from_the_start(pair: Service) -> None:
    pair.clock.now += 600
    assert report_b(pair, 60) == []
    assert report_b(pair, 10) == ["gpu-a"]


def test_if_over_half_fall_silent_together_none_is_closed_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service(server(), second(), second("gpu-c", 2))
    names = {"gpu-a": 0, "gpu-b": 8, "gpu-c": 16}
    for name, first in names.items():
        service.report(gpu(first), gpu(first + 1), name=name, after_s=3)
    assert service.pass_time(600) == []
    assert service.receiver.silence.servers_held == 3
    service.allocate("t", 2)
    together = [
        record.getMessage() for record in caplog.records if "fell silent together" in record.getMessage()
    ]
    assert together == [
        "over half of the watched servers fell silent together (gpu-a, gpu-b, gpu-c): this service or the "
        "network is the likely cause, so none of them is closed"
    ]
    for name in ("gpu-a", "gpu-b"):
        service.report(gpu(names[name]), gpu(names[name] + 1), name=name, after_s=1)
    assert service.pass_time(5) == []
    assert service.receiver.silence.servers_held == 0, "the others report again"


def test_a_single_watched_server_is_more_than_half_of_all(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    assert service.pass_time(600) == []
    assert service.server["available_gpus"] == 2
    assert service.receiver.silence.servers_held == 1


def test_a_gpu_that_cannot_be_seen_says_nothing_of_its_processes(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    service.allocate("t")
    service.manager.release_resources("t")
    service.report(gpu(0, lost=True), gpu(1))
    service.report(gpu(1))
    service.report(gpu(0, processes=None), gpu(1))
    assert [each["gpu_id"] for each in service.server["gpus_cleaning"]] == [0]


@pytest.mark.parametrize(
    ("found", "reason", "stops"),
    [
        ({"xids": [{"xid": 79, "count": 1, "at": 1010.0}]}, "xid 79; ", True),
        ({"lost": True}, "gpu lost; ", True),
        ({"rows_failed": True}, "row remap failed; ", True),
        ({"xids": [{"xid": 48, "count": 1, "at": 1010.0}]}, "xid 48; ", False),
        ({"rows_pending": True}, "row remap pending; ", False),
        ({"xids": [{"xid": 13, "count": 9, "at": 1010.0}]}, None, False),
        ({"xids": [{"xid": 99999, "count": 1, "at": 1010.0}]}, None, False),
        ({"throttle_reasons": ["hardware slowdown"]}, None, False),
    ],
)
def test_a_condition_closes_its_gpu_and_never_ends_the_lease(
    service: Service, found: dict[str, Any], reason: str | None, stops: bool
) -> None:
    service.allocate("t", 2)
    service.report(gpu(0), gpu(1, **found))
    if reason is None:
        assert service.closed == {}
        return
    assert service.closed[1].startswith(reason)
    lease = service.manager.leases()[0]
    assert lease["gpu_failed"] == (service.closed[1] if stops else "")


def test_a_missing_uuid_closes_its_gpu_and_no_lease_moves(service: Service) -> None:
    """The index shifts after a loss: GPU 1 is now the first."""
    service.allocate("t", 2)
    service.report(gpu(1))
    assert service.closed == {0: f"uuid missing; {uuid(0)}"}
    (lease,) = service.manager.leases()
    assert lease["gpu_uuids"] == [uuid(0), uuid(1)]
    service.report(gpu(1), gpu(0))
    assert service.closed == {0: f"uuid missing; {uuid(0)}"}, "another order says nothing; it stays closed"


def test_a_missing_uuid_closes_the_server_where_the_cluster_says_so(service: Service) -> None:
    rule = HealthRule("uuid missing", "close server")
    service.manager.commit(
        lambda cluster, now: [ClusterSettingsChanged(replace(cluster.settings, health=(rule,)), now)]
    )
    service.report(gpu(1))
    assert service.server["drain_reason"] == "uuid missing; GPU 0: the GPU of this UUID is not on the server"
    assert service.closed == {}


def test_an_unknown_uuid_makes_the_server_an_error_until_the_lists_agree(service: Service) -> None:
    service.report(gpu(0), gpu(5), gpu(1))
    row = service.server
    assert row["state"] == "ERROR"
    lists = f"inventory: {uuid(0)}, {uuid(1)}; server: {uuid(0)}, {uuid(1)}, {uuid(5)}"
    assert row["drain_reason"] == f"unknown uuid; {lists}"
    for _ in range(3):
        assert service.server["state"] == "ERROR"
        service.report(gpu(0), gpu(1))
    assert service.server["state"] == "IDLE"


def test_soft_conditions_recover_after_three_clean_reports_and_hard_ones_do_not(service: Service) -> None:
    service.report(gpu(0, rows_pending=True), gpu(1, xids=[{"xid": 48, "count": 1, "at": 1.0}]))
    service.report(gpu(0), gpu(1))
    service.report(gpu(0), gpu(1))
    service.report(gpu(0, rows_pending=True), gpu(1))
    for _ in range(3):
        assert service.closed.keys() == {0, 1}
        service.report(gpu(0), gpu(1))
    assert service.closed.keys() == {1}
    service.manager.resume("gpu-a", 1)
    service.report(gpu(0), gpu(1, xids=[{"xid": 48, "count": 1, "at": service.clock.now - 60}]))
    assert service.closed == {}, "the XID from before it was opened"
    later = {"xid": 48, "count": 1, "at": service.clock.now + 9}
    service.report(gpu(0), gpu(1, xids=[later]))
    assert service.closed.keys() == {1}


def test_a_gpu_that_an_operator_drained_stays_closed_whatever_is_reported(service: Service) -> None:
    service.manager.drain("gpu-a", 0, reason="fans")
    service.report(gpu(0, rows_pending=True), gpu(1))
    assert service.closed == {0: "drained; fans"}
    service.report(gpu(1))
    assert service.closed[0].startswith("drained; fans; uuid missing")
    for _ in range(4):
        service.report(gpu(0), gpu(1))
    assert service.closed.keys() == {0}
    service.manager.resume("gpu-a", 0)
    assert service.closed == {}


@pytest.mark.parametrize("drained_first", [True, False])
def test_a_server_that_an_operator_drained_stays_closed_through_a_swap(
    service: Service, drained_first: bool
) -> None:
    """Its GPUs were granted in the middle of the maintenance, once the agent saw the old ones again."""
    if not drained_first:
        service.report(gpu(0), gpu(5))
    service.manager.drain("gpu-a", reason="GPU swap today, ask Ann")
    service.report(gpu(0), gpu(5))
    for _ in range(4):
        service.report(gpu(0), gpu(1))
    assert (service.server["drained"], service.server["drain_reason"]) == (True, "GPU swap today, ask Ann")
    service.manager.resume("gpu-a")
    service.report(gpu(0), gpu(5))
    assert service.server["drain_reason"].startswith("unknown uuid; ")


def test_a_worse_condition_replaces_the_reason_and_a_lesser_one_does_not(service: Service) -> None:
    service.report(gpu(0, rows_pending=True), gpu(1))
    service.report(gpu(0, rows_pending=True, rows_failed=True), gpu(1))
    assert service.closed[0].startswith("row remap failed; ")
    service.report(gpu(0, rows_pending=True), gpu(1))
    assert service.closed[0].startswith("row remap failed; ")
    assert service.kinds.count("gpuclosed") == 2


def test_a_server_that_must_be_rebooted_takes_no_leases(service: Service) -> None:
    service.report(gpu(0, recovery_action="node reboot"), gpu(1))
    assert service.server["state"] == "ERROR"
    assert service.server["drain_reason"].startswith("recovery action: node reboot; GPU 0: ")


def test_a_rogue_process_closes_its_gpu_for_new_leases_only_while_it_is_there(service: Service) -> None:
    service.report(gpu(0, processes=[process()]), gpu(1))
    assert service.closed == {0: "rogue process; pid 77 of eve: python mine.py"}
    lease = service.allocate("t")
    assert lease["gpu_ids"] == [1]
    for _ in range(3):
        service.report(gpu(0), gpu(1))
    assert service.closed == {}
    elsewhere = process(lease_id="t", lease_source="environment")
    service.report(gpu(0, processes=[elsewhere]), gpu(1))
    assert 0 in service.closed, "a process of a lease on another GPU is rogue here"


def test_the_reason_of_a_rogue_process_names_the_lease_of_its_mark_and_what_became_of_it(
    pair: Service,
) -> None:
    def reason(process: dict[str, Any]) -> str:
        pair.report(gpu(0, processes=[process]), gpu(1))
        found = pair.closed[0]
        pair.report(gpu(0), gpu(1))
        pair.manager.resume("gpu-a", 0)
        assert found.startswith("rogue process; pid 77 of eve: python mine.py; of ")
        return found.removeprefix("rogue process; pid 77 of eve: python mine.py; of ")

    def marked(token: int, **known: Any) -> dict[str, Any]:
        return process(job=f"gpu-train-0a1b2c3d-{token}", lease_source="cgroup", **known)

    pair.allocate("dag/run/train", 1, server="gpu-b", owner="ada")
    name = f"dag/run/train {short_id(1)}"
    assert reason(marked(1)) == f"lease {name} (token 1, owner ada), which has gpu-b"
    by_id = process(lease_id="dag/run/train", lease_source="environment")
    assert reason(by_id) == f"lease {name} (token 1, owner ada), which has gpu-b"
    pair.manager.commit(lambda cluster, now: [Quarantined("dag/run/train", 1, now)])
    assert reason(marked(1)) == (f"lease {name} (token 1, owner ada), which is quarantined on gpu-b")
    pair.manager.release_resources("dag/run/train")
    assert reason(marked(1)) == f"lease {name} (token 1), which ended at 1970-01-12T13:47Z"
    pair.report(gpu(8), gpu(9), name="gpu-b", after_s=0.5)
    assert reason(marked(1)) == "job gpu-train-0a1b2c3d-1, which has ended"
    ended = marked(1, lease_id="dag/run/train")
    assert reason(ended) == "lease dag/run/train (token 1), which has ended"
    assert reason(marked(17)) == "job gpu-train-0a1b2c3d-17, which is unknown here"
    long = "x" * 500
    pair.allocate(long, 1, server="gpu-b", owner="o" * 250)
    loud = process(user="u" * 255, command="c" * 255, lease_id=long, lease_source="environment")
    pair.report(gpu(0, processes=[]), gpu(1, processes=[loud]))
    assert len(pair.closed[1]) < 400
    assert pair.closed[1].endswith(", which has gpu-b")


def test_what_cannot_be_read_is_never_rogue_and_rogues_may_be_ignored() -> None:
    hidden = process(user=None, command=None, lease_source="unreadable")
    service = Service(server())
    service.report(gpu(0, processes=[hidden]), gpu(1))
    assert service.closed == {}
    ignoring = Service(server(), rogue="ignore")
    ignoring.report(gpu(0, processes=[process()]), gpu(1))
    assert ignoring.closed == {}


def test_what_cannot_be_read_may_be_of_the_lease_that_has_ended_and_of_no_other() -> None:
    """As where the agent is an ordinary user's, and the jobs are another's."""
    hidden = process(user="root", command="python train.py", lease_source="unreadable")
    service = Service(server())
    for each in ("t", "beside"):
        service.allocate(each, 1, gpu_milli=500)
    service.report(gpu(0, processes=[hidden]), gpu(1))
    service.manager.release_resources("t")
    assert service.report(gpu(0, processes=[hidden]), gpu(1))["cleaning"] == [], "it may be the other's"
    service.manager.release_resources("beside")
    assert service.report(gpu(0, processes=[hidden]), gpu(1))["cleaning"] != []
    assert service.allocate("next")["gpu_ids"] == [1]
    for _ in range(7):
        service.report(gpu(0, processes=[hidden]), gpu(1))
    assert service.closed[0].endswith("pid 77 of root: python train.py")
    service.report(gpu(0), gpu(1))
    for _ in range(3):
        service.report(gpu(0), gpu(1))
    assert service.allocate("last")["gpu_ids"] == [0]
    ignoring = Service(server(), rogue="ignore")
    ignoring.allocate("t")
    ignoring.report(gpu(0, processes=[hidden]), gpu(1))
    ignoring.manager.release_resources("t")
    ignoring.report(gpu(0, processes=[hidden]), gpu(1))
    assert ignoring.allocate("next")["gpu_ids"] == [0]


def test_a_job_that_draws_may_be_on_other_gpus_than_its_own(service: Service) -> None:
    """It may merely have found them; on its own GPU it is waited for."""
    token = service.allocate("t")["fencing_token"]
    drawing = process(job=f"gpu-t-0a1b2c3d-{token}", lease_source="environment", draws=True)
    both = gpu(0, processes=[drawing]), gpu(1, processes=[drawing])
    service.report(*both)
    assert service.closed == {}
    service.manager.release_resources("t")
    assert [each["gpu_id"] for each in service.report(*both)["cleaning"]] == [0]


def test_a_process_without_a_mark_is_not_rogue_beside_a_lease_of_any_tasks(service: Service) -> None:
    service.allocate("t", 1, labels={"scope": "run"})
    service.report(gpu(0, processes=[process()]), gpu(1))
    assert service.closed == {}


def test_a_process_that_registered_itself_belongs_to_its_lease_until_it_ends(service: Service) -> None:
    lease = service.allocate("t", 1, labels={"scope": "process"})
    own = process(78, job=f"gpu-t-0a1b2c3d-{lease['fencing_token']}", lease_source="registration")
    service.report(gpu(0, processes=[own]), gpu(1))
    assert service.closed == {}
    service.report(gpu(0, processes=[own, process()]), gpu(1))
    assert service.closed == {0: "rogue process; pid 77 of eve: python mine.py"}
    for _ in range(3):
        service.report(gpu(0, processes=[own]), gpu(1))
    service.manager.release_resources("t")
    service.report(gpu(0, processes=[own]), gpu(1))
    assert service.allocate("next")["gpu_ids"] == [1], "its process is still there"
    service.report(gpu(0), gpu(1))
    assert service.allocate("last")["gpu_ids"] == [0]


# ---- reports that are refused ----


def refused(service: Service, value: dict[str, Any]) -> str:
    version = service.manager.get_resource_summary()["version"]
    kept = service.manager.store.reports.reports(["gpu-a"])
    with pytest.raises((ReportError, UnknownNodeError)) as caught:
        service.send(value)
    assert service.manager.get_resource_summary()["version"] == version
    assert service.manager.store.reports.reports(["gpu-a"]) == kept
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_reports_that_are_old_or_of_somebody_else_change_nothing(service: Service) -> None:
    broken = gpu(0, rows_failed=True)
    service.report(gpu(0), gpu(1))
    now = service.clock.now
    assert refused(service, report(now, broken, gpu(1))) == "report: older than the last one of this server"
    assert "24 h before the store's time" in refused(service, report(now - 86400, broken, gpu(1)))
    other = report(now + 1, broken, gpu(1), boot_id="boot-2", uptime_s=5000.0, hostname="gpu-b")
    assert refused(service, other) == ("report: of gpu-b, but gpu-a reports as gpu-a: one server, one agent")
    assert "gpu-z" in refused(service, report(now, gpu(0), name="gpu-z"))
    assert service.closed == {}


def test_a_server_that_was_started_again_and_one_with_a_wrong_clock_are_taken(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    service.report(gpu(0), gpu(1), boot_id="boot-2", uptime_s=3.0)
    service.clock.now += 5
    service.send(report(service.clock.now - 3600, gpu(0), gpu(1), boot_id="boot-2", uptime_s=8.0))
    assert service.server["watched"]
    service.clock.now += 40
    late = report(service.clock.now, gpu(0), gpu(1), boot_id="boot-3", uptime_s=90000.0, hostname="other")
    service.send(late)


def test_a_report_with_an_error_is_kept_and_says_nothing_of_the_gpus(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    for _ in range(4):
        service.report(error="the GPU driver hangs")
    assert service.closed == {}
    assert b"the GPU driver hangs" in service.manager.store.reports.reports(["gpu-a"])["gpu-a"]


def test_pending_requests_make_reports_come_each_second(service: Service) -> None:
    service.report(gpu(0), gpu(1))
    service.allocate("t", 2)
    service.manager.submit("next", 1, 1)
    answers = [service.report(gpu(0), gpu(1), after_s=1.0) for _ in range(60)]
    assert answers[0]["next_s"] == 1.0
    assert 50 <= sum("next_s" in answer for answer in answers) <= 60


class Sleepy(MemoryReports):
    """Reports of a store; the process that reads a record next sleeps while `meanwhile` happens."""

    meanwhile: Callable[[], object] | None = None

    def records(self, servers: Iterable[str]) -> dict[str, bytes]:
        found = super().records(servers)
        if meanwhile := self.meanwhile:
            self.meanwhile = None
            meanwhile()
        return found


def test_a_report_that_a_process_slept_on_is_refused_once_another_one_has_newer_ones() -> None:
    first = Service(server())
    store = first.manager.store
    assert isinstance(store, MemoryStore)
    store.reports = sleepy = Sleepy(first.clock)
    manager = GPUResourceManager(Settings(store="memory://"), store=store)
    other = ReportReceiver(manager)
    first.report(gpu(0), gpu(1))
    lease = first.allocate("a")
    left = process(lease_id="a", lease_source="environment")

    def meanwhile() -> None:
        for ended in (False, True):
            if ended:
                first.manager.release("a", fencing_token=lease["fencing_token"])
            first.clock.now += 10
            said = report(first.clock.now, gpu(0, processes=[left]), gpu(1))
            manager.read(lambda cluster, now: None)
            other.receive(read_report(as_text(said)))

    sleepy.meanwhile = meanwhile
    with pytest.raises(ReportError, match="older than the last one"):
        first.report(gpu(0), gpu(1))
    assert [entry["gpu_id"] for entry in first.server["gpus_cleaning"]] == [0]
    newest = read_report(store.reports.reports(["gpu-a"])["gpu-a"])
    assert newest.gpus[0].processes, "the older report is not kept"


def test_reports_of_a_server_that_come_at_once_are_judged_in_turn(service: Service) -> None:
    store = service.manager.store
    assert isinstance(store, MemoryStore)
    store.reports = sleepy = Sleepy(service.clock)
    older, newer = (
        read_report(as_text(report(service.clock.now + at, gpu(0, utilization_percent=at), gpu(1))))
        for at in (1, 2)
    )
    with ThreadPoolExecutor() as pool:
        later: list[Future[ReportAnswer]] = []

        def meanwhile() -> None:
            later.append(pool.submit(service.receiver.receive, newer))
            with suppress(TimeoutError):
                later[0].result(0.2)

        sleepy.meanwhile = meanwhile
        service.receiver.receive(older)
        later[0].result(60)
    assert read_report(store.reports.reports(["gpu-a"])["gpu-a"]) == newer
