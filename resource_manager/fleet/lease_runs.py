"""Jobs of a lease as the agents of its servers last reported them, and what follows for the lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from resource_manager.jobs.gang_job import StartupOrder, order_of
from resource_manager.jobs.job_preemption import is_taken
from resource_manager.jobs.running_job import RunningJob
from resource_manager.manager.agent_jobs import run_at
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import Allocation


@dataclass(frozen=True)
class LeaseRuns:
    """What is known of the jobs of one lease; the store is read once, by the first question about them."""

    manager: GPUResourceManager
    lease: Allocation

    @cached_property
    def by_key(self) -> dict[str, dict[str, Any] | None]:
        """The jobs as last reported, in the order of their ranks; None for one of which nothing is known."""
        return {
            job.key: run_at(self.manager.agent_state(job.server), job.place, job.key)
            for job in RunningJob.all_of(self.lease)
        }

    @property
    def must_wait_for_others(self) -> bool:
        """Whether rank 0 of a gang starts after the others, and one of them has not begun."""
        return self.first_is_late and any(map(_has_not_begun, [*self.by_key.values()][1:]))

    @property
    def first_is_late(self) -> bool:
        """Whether rank 0 of a gang starts after the others, and has not begun."""
        is_last = order_of(self.lease["labels"]) is StartupOrder.WORKERS_FIRST
        return is_last and _has_not_begun(next(iter(self.by_key.values())))

    @property
    def is_taken(self) -> bool:
        """Whether the lease is being preempted, or one of its jobs was told so before that was taken back."""
        return is_taken(self.lease, lambda: [bool(run and run["preempted"]) for run in self.by_key.values()])

    def ends(self, key: str) -> bool:
        """Return whether the job of a gang's member is ended: one has failed, or could not be started.

        That one is left alone: an end would take the place of its reason in what its agent tells.
        """
        runs = self.by_key if self.lease["nodes"] > 1 else {}
        return not was_refused(runs.get(key)) and any(
            was_refused(run) or _has_failed(run) for run in runs.values()
        )

    def is_over(self, run: Mapping[str, Any]) -> bool:
        """Return whether a job has ended, was refused, or was ended or preempted before it began."""
        if run["state"] != "absent":
            return bool(run["state"] == "finished")
        return bool(run["refusal"] or run["ended"]) or self.was_preempted_before(run)

    def was_preempted_before(self, run: Mapping[str, Any]) -> bool:
        """Return whether the preemption that now is of the lease came before a job of it began."""
        is_of_now = (run["want"], run["n"]) == ("preempt", str(self.lease["until"]))
        return run["state"] == "absent" and is_of_now and run["error"] is None and self.is_taken


def was_refused(run: Mapping[str, Any] | None) -> bool:
    """Return whether an agent could not start a job, or must not."""
    return run is not None and run["state"] == "absent" and bool(run["refusal"])


def _has_failed(run: Mapping[str, Any] | None) -> bool:
    """Return whether a job has failed by itself; one that was told of a preemption has saved what it did."""
    is_over = run is not None and run["state"] == "finished" and run["exit_code"] != 0
    return is_over and run is not None and not run["ended"] and not run["preempted"]


def _has_not_begun(run: Mapping[str, Any] | None) -> bool:
    return run is None or run["state"] == "absent"
