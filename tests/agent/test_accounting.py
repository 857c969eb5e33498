"""Report of GPU-hours with what the servers measured: a lease that computes nothing is idle."""

from __future__ import annotations

import pytest

from resource_manager import GPUResourceManager
from resource_manager.agent.accounting import report_of
from resource_manager.agent.receiving import ReportReceiver
from resource_manager.agent.reports import read_report
from resource_manager.manager.report import ReportQuery
from resource_manager.storage.memory import MemoryStore
from tests.agent.reporting import as_text, gpu, process, report, server
from tests.builders import Clock


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
            receiver.receive(read_report(text), text)

        sample(80)
        clock.now += 1800
        sample(0)
        clock.now += 1800
        sample(0)
        found = report_of(manager, ReportQuery(since=7200.0))["total"]
    assert (found["granted"], found["used"], found["idle"]) == (
        pytest.approx(2.0),
        pytest.approx(1.5),
        pytest.approx(0.5),
    )
