"""Jobs that Slurm places: records beside the state, which those who watch the jobs keep up to date.

They hold no capacity of the state, and a store's changes know nothing of them. Each cluster has one record,
which its login node's files determine, so that whichever watcher writes last writes the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain

from pydantic import TypeAdapter

from resource_manager.core.identifiers import check_names
from resource_manager.core.models import MAX_TIME_S, Request
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.demand_fields import MAX_COUNT
from resource_manager.manager.results import SlurmJob
from resource_manager.scheduling.accounting.gpu_hours import FAILED, NONE, PREEMPTED, USED, GpuHours, Segment
from resource_manager.scheduling.accounting.lives import Wait
from resource_manager.storage import Store
from resource_manager.storage.reports import RECORD_TTL_S

SOURCE = "slurm"

INDEX = f"{SOURCE}/"
"""Name, no server can have it, of the record with the names of the clusters, and begin of those of theirs."""

INDEX_EVERY_S = 3600.0
"""Time between two writes of the names, which must not lapse before a cluster's jobs. Each write may lose a
name that another watcher adds at that moment."""

MAX_EXIT_CODE = 2**31 - 1
"""Clients read no answer with a number that is far larger."""

MAX_CLUSTERS = 16
"""Most clusters of which jobs are kept at once: any caller may name one."""


JOBS = TypeAdapter(list[SlurmJob])


def _check(jobs: Sequence[SlurmJob]) -> None:
    for job in jobs:
        texts = [text for text in job.values() if isinstance(text, str)]
        check_names({"jobs": [*texts, *chain.from_iterable(job["labels"].items())]})
        times = (job["begins_at"], job["submitted_at"], job["started_at"], job["ended_at"])
        if not (0 <= job["gpus"] <= MAX_COUNT and 0 <= job["nodes"] <= MAX_COUNT):
            raise InvalidRequestError("{jobs}: gpus and nodes must be 0 to {:,}", MAX_COUNT)
        if abs(job["exit_code"] or 0) > MAX_EXIT_CODE:
            most = MAX_EXIT_CODE
            raise InvalidRequestError("{jobs}: exit_code must be {:,} to {:,}", -most, most)
        if not all(at is None or 0 <= at <= MAX_TIME_S for at in times):
            raise InvalidRequestError("{jobs}: times must be 0 to {:g} seconds", MAX_TIME_S)


def keep(store: Store, cluster: str, jobs: Sequence[SlurmJob]) -> None:
    """Replace what is known of the jobs of a cluster; raises `InvalidRequestError`."""
    _check(jobs)
    names = _clusters(store)
    if cluster not in names:
        if len(names) >= MAX_CLUSTERS:
            live = store.reports.records([f"{INDEX}{name}" for name in names])
            names = [name for name in names if f"{INDEX}{name}" in live]
        if len(names) >= MAX_CLUSTERS:
            text = "{cluster}: jobs of {} clusters are kept already, as many as can be at once"
            raise InvalidRequestError(text, MAX_CLUSTERS)
    if cluster not in names or not store.reports.reports([INDEX]):
        index = json.dumps([*dict.fromkeys([*names, cluster])]).encode()
        store.reports.put(INDEX, index, index, INDEX_EVERY_S)
    record = JOBS.dump_json(list(jobs))
    store.reports.put(f"{INDEX}{cluster}", record, record, RECORD_TTL_S)


def jobs_on_slurm(store: Store) -> list[SlurmJob]:
    """Return the jobs of all clusters, as last told, the latest submitted first."""
    names = [f"{INDEX}{name}" for name in _clusters(store)]
    found = store.reports.records(names) if names else {}
    jobs = [job for record in found.values() for job in JOBS.validate_json(record)]
    return sorted(jobs, key=lambda job: -(job["submitted_at"] or 0.0))


def is_live(job: SlurmJob) -> bool:
    """Return whether a job is pending or runs."""
    return job["ended_at"] is None


def add_hours(hours: GpuHours, jobs: Sequence[SlurmJob], now: float) -> None:
    """Count the jobs' GPU-hours and waits as those of leases; Slurm measures no use, so success is use."""
    for number, job in enumerate(jobs, start=1):
        labels = {**job["labels"], "launcher": SOURCE}
        request = Request(job["task_id"], job["gpus"], team=job["team"], owner=job["owner"], labels=labels)
        began, ended = job["started_at"], job["ended_at"] or now
        if job["submitted_at"] is not None:
            hours.waits.append(Wait(request, job["submitted_at"], max(began or ended, job["submitted_at"])))
        if began is not None:
            gpus = job["gpus"] * job["nodes"]
            end = max(ended, began)
            hours.segments.append(Segment(request, -number, NONE, gpus, began, end, _category(job)))


def _category(job: SlurmJob) -> str:
    if is_live(job):
        return ""
    if job["state"] == "PREEMPTED":
        return PREEMPTED
    return USED if job["exit_code"] == 0 else FAILED


def _clusters(store: Store) -> list[str]:
    found = store.reports.records([INDEX])
    return list(json.loads(found[INDEX])) if INDEX in found else []
