"""Judgement of a report: it changes nothing itself; the record kept is of the state it was committed on."""

from __future__ import annotations

from copy import deepcopy

from resource_manager import GPUResourceManager, MemoryStore
from resource_manager.agent.report_format import read_report
from resource_manager.core.cluster import ClusterState
from resource_manager.fleet.judgement import judge
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.fleet.records import records_of
from resource_manager.settings import Settings
from tests.agent.reporting import as_text, gpu, process, report, server
from tests.builders import Clock


def test_a_report_judged_twice_says_the_same_and_changes_neither_state_nor_record() -> None:
    cluster = ClusterState([server()])
    first = judge(cluster, read_report(as_text(report(10.0, gpu(0), gpu(1)))), None, {}, 10.0)
    for change in first.changes:
        cluster.apply(change)
    before, state = deepcopy(first.record), cluster.snapshot()
    lost = read_report(as_text(report(20.0, gpu(0, lost=True), gpu(1, processes=[process()]))))
    again = [judge(cluster, lost, first.record, {}, 20.0) for _ in range(2)]
    assert again[0] == again[1]
    assert len(again[0].changes) == 2
    assert (first.record, cluster.snapshot()) == (before, state)


def test_the_record_kept_is_of_the_judgement_that_was_committed() -> None:
    """An operator opens the GPU that a third clean report would open on the state that the receiver knows."""
    clock = Clock()
    clock.now = 1e6
    store = MemoryStore(clock=clock)
    mine, other = (
        GPUResourceManager(Settings(store="memory://"), store=store, inventory=[server()]) for _ in range(2)
    )
    receiver = ReportReceiver(mine)

    def send(*gpus: dict[str, object]) -> None:
        clock.now += 10
        receiver.receive(read_report(as_text(report(clock.now, *gpus))))

    send(gpu(0), gpu(1, processes=[process()]))
    for _ in range(2):
        send(gpu(0), gpu(1))
    assert records_of(store, ["gpu-a"])["gpu-a"].clean == {1: 2}
    other.resume("gpu-a", gpu=1)
    send(gpu(0), gpu(1))
    kinds = [change["change"] for change in other.history()]
    assert kinds == ["agentseen", "gpuclosed", "gpuopened"], "it is opened once"
    assert records_of(store, ["gpu-a"])["gpu-a"].clean == {}
