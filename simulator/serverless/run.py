"""One simulated episode from first arrival to last completion, with its records and summary."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.progress import Progress, no_progress
from simulator.serverless.raw_env import RawEnv
from simulator.serverless.scheduler import PolicyScheduler, run_episode
from simulator.timing import timed


@dataclass(frozen=True, slots=True)
class FunctionRecord:
    """Run of one function: its node, its times (s), and the rent ($) from its decision to the next."""

    wf_id: int
    fn_id: int
    server_name: str
    server_id: int
    numa_node_id: int
    submission_time: float
    creation_time: float
    start_time: float
    completion_time: float
    rent: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of an episode; seconds, dollars, and functions per second of processor time.

    `wall_s` is longer than `cpu_s` where other processes take turns on the processor.
    """

    functions: int
    workflows: int
    mean_makespan_s: float
    last_completion_s: float
    rent: float
    wall_s: float
    cpu_s: float
    functions_per_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """Records in order of decision, makespans in seconds by workflow, and the totals."""

    records: tuple[FunctionRecord, ...]
    makespans_s: tuple[float, ...]
    summary: Summary


def run(
    env: RawEnv,
    scheduler: PolicyScheduler,
    seed: int | None = None,
    progress: Progress = no_progress,
) -> Episode:
    """Simulate one episode; `progress` receives the finished workflows."""
    decided = []
    completions: dict[int, float] = {}
    with timed() as times:
        for log in run_episode(env, scheduler, seed):
            decided.append(log)
            if log.finished_workflow_records:
                completions.update(log.finished_workflow_records)
                progress(len(completions), len(env.workload))
    records = tuple(
        FunctionRecord(
            log.wf_id,
            log.fn_id,
            log.server_name,
            log.server_id,
            log.numa_node_id,
            log.submission_time,
            log.creation_time,
            function.start_time,
            function.completion_time,
            log.rent,
        )
        for log in decided
        for function in (env.workload[log.wf_id][log.fn_id],)
    )
    makespans_s = tuple(completions[workflow.wf_id] - workflow.arrival_time for workflow in env.workload)
    summary = Summary(
        functions=len(records),
        workflows=len(makespans_s),
        mean_makespan_s=sum(makespans_s) / len(makespans_s),
        last_completion_s=max(completions.values()),
        rent=sum(record.rent for record in records),
        wall_s=times.wall_s,
        cpu_s=times.cpu_s,
        functions_per_s=times.per_s(len(records)),
    )
    return Episode(records, makespans_s, summary)
