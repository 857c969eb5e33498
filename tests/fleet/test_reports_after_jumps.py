"""Reports and silence after the store's clock was set back, on every kind of store."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.core.changes import AgentLost, ClusterSettingsChanged
from resource_manager.core.models import Gpu, Node
from resource_manager.fleet.receiving import ReportReceiver
from tests.agent.reporting import as_text, gpu, report, uuid
from tests.eventually import wait_for
from tests.manager.commit.test_clock_jumps import HOUR_S, Moved, moved

__all__ = ["moved"]

NAMES = ("gpu-a", "gpu-b", "gpu-c")


SILENT_AFTER_S = 2.0
INTERVAL_S = 0.2


class Service:
    """A service with three agents, which report when a test says so."""

    def __init__(self, moved: Moved) -> None:
        self._moved = moved
        nodes = [
            Node(name, number, {"cpus": 64}, (Gpu(0, "A100", uuid=uuid(number)),))
            for number, name in enumerate(NAMES)
        ]
        moved.stack.enter_context(GPUResourceManager.from_url(moved.url, inventory=nodes))
        self.open()
        self.manager.commit(
            lambda cluster, now: [
                ClusterSettingsChanged(replace(cluster.settings, silent_after_s=SILENT_AFTER_S), now)
            ]
        )
        self.report(*NAMES)

    def open(self) -> None:
        """Be another process from now on."""
        self.manager = self._moved.stack.enter_context(GPUResourceManager.from_url(self._moved.url))
        self.receiver = ReportReceiver(self.manager)

    def report(self, *names: str, boot: str = "boot-1", uptime_s: float | None = None) -> None:
        for name in names:
            known = {"boot_id": boot, "uptime_s": uptime_s or time.monotonic(), "interval_s": INTERVAL_S}
            each = gpu(NAMES.index(name), processes=[])
            sent = report(self.manager.store.now(), each, name=name, **known)
            self.receiver.receive(read_report(as_text(sent)))

    def lost(self, *alive: str) -> list[str]:
        """Return which agents are lost while these report."""
        self.report(*alive)
        time.sleep(INTERVAL_S / 2)
        return [c.node for c in self.receiver.note_silence() if isinstance(c, AgentLost)]


@pytest.mark.parametrize("is_another", [False, True], ids=["the same service", "another one"])
def test_an_agent_that_died_is_silent_after_the_usual_time(moved: Moved, is_another: bool) -> None:
    service = Service(moved)
    assert service.lost(*NAMES) == []
    moved.jump(-HOUR_S)
    if is_another:
        service.open()
    begin = time.monotonic()
    wait_for(lambda: service.lost("gpu-a", "gpu-b"))
    assert time.monotonic() - begin > SILENT_AFTER_S / 2
    silent = service.manager.read(
        lambda cluster, now: [s.name for s in cluster.nodes if s.silent is not None]
    )
    assert silent == ["gpu-c"]
    [change] = [each for _, each in service.manager.store.history(0, 1000) if isinstance(each, AgentLost)]
    assert change.since <= service.manager.store.now()


def test_a_server_that_was_started_again_may_report(moved: Moved) -> None:
    service = Service(moved)
    moved.jump(-HOUR_S)
    service.manager.expire_and_schedule()
    service.report("gpu-a", boot="boot-2", uptime_s=5.0)
