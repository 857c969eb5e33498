"""Report of GPU-hours with what the servers measured: a lease that computes nothing is idle."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.fleet.opening import REPORTS
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.fleet.server_use import measures_of
from resource_manager.storage.memory import MemoryStore
from tests.agent.reporting import as_text, gpu, process, report, server
from tests.builders import Clock
from tests.fleet.test_receiving import Service


def test_a_lease_is_idle_from_when_it_computes_nothing() -> None:
    clock = Clock()
    with GPUResourceManager(store=MemoryStore(clock=clock), inventory=[server(gpus=2)]) as manager:
        receiver = ReportReceiver(manager)
        manager.submit("busy", 1)
        manager.submit("lazy", 1)
        mine = [process(7, lease_id=name, lease_source="environment", job=None) for name in ("busy", "lazy")]

        def sample(second: int) -> None:
            used = [gpu(0, utilization_percent=90, processes=mine[:1])]
            used.append(gpu(1, utilization_percent=second, processes=mine[1:]))
            text = as_text(report(clock.now, *used))
            receiver.receive(read_report(text))

        sample(80)
        clock.now += 1800
        sample(0)
        clock.now += 1800
        sample(0)
        manager.read_reports_by(REPORTS)
        found = manager.report(since=7200.0)["total"]
    assert (found["granted"], found["used"], found["idle"]) == pytest.approx((2.0, 1.5, 0.5))


def test_what_was_measured_outlives_the_lease_and_its_report() -> None:
    service = Service(server(gpus=3))
    mine = [process(7, lease_id="t", lease_source="environment", job=None)]

    def sample(used: int, wh: float, **more: Any) -> None:
        both = [gpu(0, utilization_percent=used, processes=mine, energy_mj=int(wh * 3.6e6))]
        both += [gpu(1, processes=mine, power_w=360.0), gpu(2, utilization_percent=90, power_w=100.0)]
        service.report(*both, **more)

    service.allocate("t", 2, team="vision")
    service.allocate("goes on", 1, team="nlp")
    for used, wh in ((90, 70), (80, 71), (0, 73), (0, 74)):
        sample(used, wh)
    service.manager.release("t", outcome="SUCCESS")
    mine.clear()
    sample(0, 74)
    service.clock.now += 3600  # no report is left, the other lease goes on
    service.manager.read_reports_by(REPORTS)
    rows = service.manager.report(["team"], 7200.0)["rows"]
    vision = next(row for row in rows if row["group"]["team"] == "vision")
    assert vision["used"] == pytest.approx(2 * vision["idle"], rel=1e-3)
    assert vision["used"] + vision["idle"] == pytest.approx(vision["granted"])
    assert vision["energy_kwh"] == pytest.approx(0.004 + 3 * 360 * 10 / 3.6e6)


@pytest.mark.parametrize("lacks", ["all GPUs", "one GPU"])
def test_a_report_without_its_gpus_takes_nothing_back_of_what_a_lease_used(lacks: str) -> None:
    service = Service(server())
    service.allocate("t", 1)
    for used in (0, 0, 0, 90):
        service.report(gpu(0, utilization_percent=used, power_w=360.0), gpu(1))
    before = measures_of(service.manager)
    if lacks == "all GPUs":
        service.report(error="no answer within 20 s: the GPU driver hangs", source="none")
    else:
        service.report(gpu(1))
    assert measures_of(service.manager) == before != {}
    service.report(gpu(0, utilization_percent=90, power_w=360.0), gpu(1))
    [measure] = measures_of(service.manager).values()
    assert measure.busy == pytest.approx(0.25 if lacks == "one GPU" else 0.4)


def test_a_share_takes_its_part_of_the_energy_and_nothing_is_said_of_what_was_not_measured() -> None:
    service = Service(server())
    service.allocate("half", 1, gpu_milli=500)
    service.allocate("dark", 1)
    for _ in range(3):
        service.report(gpu(0, power_w=360.0), gpu(1, utilization_percent=None))
    measures = measures_of(service.manager)
    assert [measure.energy_kwh for measure in measures.values()] == [pytest.approx(0.001)]
