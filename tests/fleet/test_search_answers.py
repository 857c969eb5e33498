"""Servers of a restored state: closed until searched for jobs of leases that the state does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.refusal import RefusalKind
from resource_manager.fleet.receiving import ReportAnswer
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.agent.reporting import gpu, process, report
from tests.fleet.test_sightings import Fleet

WINDOW_S = 60.0


class Restored(Fleet):
    """A fleet of a restored backup: `t` was granted before the backup, `lost` after it; both have jobs."""

    def __init__(self, folder: Path, *, drained: str = "") -> None:
        super().__init__(launcher="ssh")
        if drained:
            self.manager.drain("gpu-b", reason=drained)
        write_backup(self.manager.store, folder / "state.json")
        lost = self.allocate("lost", 1, server="gpu-b") if not drained else {"fencing_token": 99}
        self.lost = f"gpu-lost-0a1b2c3d-{lost['fencing_token']}"
        self.clock.now += 3600.0
        restore(self.manager.store, read_backup(folder / "state.json"), force=True)

    def refusal(self, server: str) -> Refusal | None:
        asked = self.manager.allocate("next", 1, server=server)
        if isinstance(asked, Refusal):
            return asked
        self.manager.release("next")
        return None

    def look(self, name: str, *keys: str, **more: Any) -> ReportAnswer:
        return self.see(name, *keys, **more)


@pytest.fixture
def fleet(tmp_path: Path) -> Restored:
    fleet = Restored(tmp_path)
    fleet.clock.now += WINDOW_S
    return fleet


def test_a_server_is_closed_until_its_agent_has_listed_all_jobs_and_each_has_a_lease(fleet: Restored) -> None:
    refused = fleet.refusal("gpu-b")
    assert refused is not None
    assert refused.kind is RefusalKind.RECOVERING
    assert "not searched since the restore of the backup of 1970-01-12" in refused.detail
    assert fleet.look("gpu-b", complete=None)["jobs"] is True, "the service asks for the list"
    fleet.look("gpu-b", complete=False)
    assert fleet.refusal("gpu-b"), "processes that cannot be read may be jobs"
    assert fleet.look("gpu-b", fleet.lost)["jobs"] is True
    assert fleet.refusal("gpu-b"), "a job of a lease that the state does not know"
    fleet.look("gpu-b")
    assert fleet.refusal("gpu-b") is None
    assert "jobs" not in fleet.look("gpu-b", complete=None)


def test_jobs_that_the_state_knows_keep_no_server_closed(fleet: Restored) -> None:
    fleet.look("gpu-a", fleet.key(), gpus=(gpu(0, processes=[process(job=fleet.key())]), gpu(1)))
    state = fleet.manager.read(lambda cluster, now: cluster.node("gpu-a").is_open)
    assert state


@pytest.mark.parametrize("mark", ["job", "lease_id"])
def test_a_process_on_a_gpu_with_the_mark_of_an_unknown_lease_keeps_its_server_closed(
    fleet: Restored, mark: str
) -> None:
    unknown: dict[str, Any] = {mark: fleet.lost}
    marked = process(**unknown, lease_source="environment")
    fleet.look("gpu-b", gpus=(gpu(8, processes=[marked]), gpu(9)))
    assert fleet.refusal("gpu-b")


def test_a_process_without_a_mark_is_no_job_of_a_lease(fleet: Restored) -> None:
    fleet.look("gpu-b", gpus=(gpu(8, processes=[process()]), gpu(9)))
    assert not fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)


def test_a_search_in_the_recovery_window_says_nothing_of_jobs_that_owners_still_stop(tmp_path: Path) -> None:
    fleet = Restored(tmp_path)
    fleet.look("gpu-b", after_s=WINDOW_S - 1.0)
    assert fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)
    fleet.look("gpu-b", after_s=2.0)
    assert not fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)


def test_a_server_that_an_operator_had_drained_stays_so_after_its_search(tmp_path: Path) -> None:
    fleet = Restored(tmp_path, drained="RMA, do not use")
    fleet.look("gpu-b", after_s=WINDOW_S + 1.0)
    drained = fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)
    assert drained is not None
    assert drained.reason == "RMA, do not use"


def test_a_server_that_an_operator_drains_meanwhile_is_searched_and_stays_drained(fleet: Restored) -> None:
    fleet.manager.drain("gpu-b", reason="fan")

    def reason() -> str:
        drained = fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)
        return "" if drained is None else drained.reason

    fleet.look("gpu-b", fleet.lost, after_s=WINDOW_S + 1.0)
    assert reason().startswith("fan; not searched since the restore")
    assert reason().endswith(f"; without a lease runs {fleet.lost}")
    fleet.look("gpu-b", after_s=2.0)
    assert reason() == "fan"


def test_the_word_of_an_operator_opens_a_server_without_an_agent(fleet: Restored) -> None:
    fleet.manager.resume("gpu-b")
    assert fleet.refusal("gpu-b") is None


def test_a_fault_that_is_over_opens_no_server_that_was_not_searched(fleet: Restored) -> None:
    strange = report(0.0, gpu(8), gpu(9), gpu(77))["gpus"]
    fleet.look("gpu-b", fleet.lost, gpus=tuple(strange))
    for _ in range(4):
        fleet.look("gpu-b", fleet.lost)
    drained = fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)
    assert drained is not None
    assert drained.failed, "the fault is over, but not the search"
    fleet.look("gpu-b", after_s=WINDOW_S)
    for _ in range(4):
        fleet.look("gpu-b")
    assert not fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)
