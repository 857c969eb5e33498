"""Jobs that should be on a server whose agent runs them, from leases and orders, and the ends of stored jobs.

What should be follows from the state alone, level by level: a job of a lease, what was ordered about it, and
whether the lease still holds. A job that no lease has is ended, and then forgotten.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import TypedDict

from resource_manager.agent.report_format import Report, RunReport
from resource_manager.core.changes import JobEnd, Outcome
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import as_reason
from resource_manager.core.models import JobPlace, Lease, has_stored_job
from resource_manager.errors import CorruptStateError, InvalidRequestError, ResourceManagerError
from resource_manager.fleet.doorbell import Doorbell
from resource_manager.fleet.job_places import STATE_MAX_AGE_S, have_not_begun, place_jobs, unplaced_on
from resource_manager.fleet.job_shares import fitting
from resource_manager.fleet.judgement import cleaned
from resource_manager.fleet.lease_runs import LeaseRuns, was_refused
from resource_manager.fleet.records import Record
from resource_manager.jobs.gang_job import StartupOrder, order_of
from resource_manager.jobs.job_preemption import preemption_order
from resource_manager.jobs.job_template import JobTemplate
from resource_manager.jobs.launchers.base import LauncherError, is_key
from resource_manager.jobs.launchers.directory_launcher import rules_of, spec_of
from resource_manager.jobs.launchers.registry import TERMINAL
from resource_manager.jobs.running_job import RunningJob, is_remainder, job_of
from resource_manager.manager import serializers
from resource_manager.manager.agent_jobs import NO_END, STARTS, end_of, is_there, jobs_on, of_no_lease
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import Allocation
from resource_manager.manager.stored_jobs import Question, check_job

logger = logging.getLogger(__name__)

END_GRACE_S = 10.0

STOPPED_S = 30.0
"""Time within which whoever stopped a job releases its lease."""

NOT_STORED = "it is not stored any more, as after 90 days or a restore without it: submit it again"


class JobsAnswer(TypedDict):
    """What should be on a server: jobs, each with what is `want`ed, and output that somebody asked for.

    Each of them has the `place` of its job, if that was placed: another agent may ask than reported last.
    `known` stands for all of it; `incarnation` and `version` are of the state from which it follows.
    """

    server: str
    incarnation: str
    version: int
    known: str
    jobs: list[dict[str, Any]]
    output: list[dict[str, Any]]


class JobBoard:
    """Jobs of all servers of a manager's store whose agents run jobs; thread-safe.

    While the state `is_behind` what somebody knows, no job is begun, and none is ended without an order.
    """

    def __init__(self, manager: GPUResourceManager, is_behind: Callable[[], bool]) -> None:
        self._manager, self._is_behind = manager, is_behind
        self.doorbell = Doorbell(manager)

    # ---- what should be ----

    def jobs(self, server: str, known: str = "") -> JobsAnswer:
        """Return what should be on a server to an agent that has the answer `known`.

        Stored jobs of new leases are placed once the agents of all their servers know of them: the question
        of a server that has died may be held still.
        """
        answer, unplaced = self._answer(server)
        if answer["known"] == known and place_jobs(self._manager, server, unplaced):
            answer, _ = self._answer(server)
        return answer

    def _answer(self, server: str) -> tuple[JobsAnswer, list[Allocation]]:
        """Return what should be on a server, and the leases there whose stored jobs wait for their places."""
        runs = self._manager.agent_state(server)["runs"]  # before the leases: what it runs has one there
        seen = self._manager.read(lambda cluster, now: _Seen.of(cluster, server, runs))
        is_behind = self._is_behind()
        wanted = seen.jobs
        orders = self._manager.stored_jobs.orders([key for key, _, _ in wanted])
        stored = self._manager.stored_jobs.jobs(
            {
                lease["task_id"]: lease["owner"]
                for _, lease, _ in wanted
                if has_stored_job(lease["labels"]) and not is_remainder(lease)
            }
        )
        items = []
        for key, lease, rank in wanted:
            token, order = lease["fencing_token"], orders.get(key)
            if isinstance(order, CorruptStateError):  # it may have been to end the job
                logger.error("nothing is told of the job of %s: %s", lease["name"], order)
                continue
            is_left = not is_behind and _is_left(lease, runs.get(key))
            if is_left and (order is None or order["want"] != "stop"):
                order = {"want": "stop", "grace_s": END_GRACE_S}
            elif not is_behind and _is_forsaken(lease, order):  # the numbers of later orders stay greater
                order = {**preemption_order(lease), "n": order["n"] if order else ""}
            if order is not None and "spec" in order:  # the rules are not its caller's to state
                rules = rules_of(job_of(lease, key, (), rank=rank))
                order = {**order, "spec": {**order["spec"], **rules}}
            if order is not None and has_stored_job(lease["labels"]):
                # Nobody else has its output, and one that is over before it began must not begin later.
                order = {**order, "keep": True, "bury": True}
            job = stored.get(lease["task_id"])
            for item in (order, None if is_behind else self._of_stored(lease, rank, job)):
                if item is not None and not (is_behind and item["want"] in STARTS):
                    there = {"token": token, "user": seen.user, **_place_of(lease, rank)}
                    items.append({"n": "", **item, "key": key, **there})
                    break
        for key in () if is_behind else seen.left:
            run = runs[key]
            want = "stop" if run["state"] == "running" else "forget"
            # A tombstone comes before the end that it is of, which may fail, or be lost with its agent.
            if (want == "stop" or not run["ended"]) and (is_key(key) or run["state"] == "finished"):
                items.append({"key": key, "want": want, "n": "", "grace_s": END_GRACE_S, "keep": True})
        begun = {item["key"] for item in items if _has_begun(item, runs.get(item["key"]))}
        items = fitting(items, {key: lease["owner"] for key, lease, _ in wanted}, begun)
        places = {key: _place_of(lease, rank) for key, lease, rank in wanted}
        output = [{**each, **places.get(each["key"], {})} for each in self._questions(server)]
        tokens = [lease["fencing_token"] for lease in seen.unplaced]
        orders_alone = [_without_time(item) for item in items]
        known = hashlib.sha256(json.dumps([orders_alone, output, tokens]).encode()).hexdigest()[:16]
        answer: JobsAnswer = {
            "server": server,
            "incarnation": self._manager.store.incarnation,
            "version": seen.version,
            "known": known,
            "jobs": items,
            "output": output,
        }
        return answer, seen.unplaced

    def _questions(self, server: str) -> list[Question]:
        try:
            return self._manager.stored_jobs.questions(server)
        except CorruptStateError as error:  # its jobs do not wait for this
            logger.error("no output is read: %s", error)
            return []

    def _of_stored(
        self, lease: Allocation, rank: int, job: Mapping[str, Any] | CorruptStateError | None
    ) -> dict[str, Any] | None:
        """Return what is wanted of the job that is stored with a request; None if it is not placed yet."""
        if not has_stored_job(lease["labels"]) or not lease["job_places"]:
            return None
        runs = LeaseRuns(self._manager, lease)
        running = next(each for each in RunningJob.all_of(lease) if each.rank == rank)
        if lease["gpu_failed"] or is_remainder(lease) or runs.ends(running.key):
            return {"want": "terminate", "grace_s": END_GRACE_S, "bury": True}
        if runs.is_taken:
            return {**preemption_order(lease), "n": str(lease["until"])}
        if rank == 0 and runs.must_wait_for_others:
            return None
        if isinstance(job, CorruptStateError):  # as of a service with other keys: another one may offer it
            logger.error("the job of %s is not started: %s", lease["name"], job)
        elif job is not None:
            try:
                check_job(job)
                started = JobTemplate.from_dict(job).job(running, lease)
                return {"want": "run", "spec": {**spec_of(started), **rules_of(started)}}
            except (InvalidRequestError, LauncherError) as error:
                self._refuse(lease, str(error))
        elif have_not_begun(self._manager, lease):
            self._refuse(lease, NOT_STORED)
        return None

    def _refuse(self, lease: Allocation, why: str) -> None:
        """End a lease whose job can be started nowhere."""
        try:
            self._manager.release(
                lease["task_id"],
                fencing_token=lease["fencing_token"],
                outcome=Outcome.FAILED,
                job_end=JobEnd.ENDED,
                reason=as_reason(f"its job cannot be started: {why}"),
                result=NO_END,
            )
        except ResourceManagerError as error:
            logger.warning("the job of %s: %s", lease["name"], error)

    # ---- ends of stored jobs ----

    def settle(self, report: Report, record: Record) -> None:
        """Renew the leases of stored jobs that run, and release those whose jobs are over, or left behind.

        `record` is that of the server's reports after this one.
        """
        if report.place is not None:  # of a lease that is newer the agent asks at once
            unplaced = self._manager.read(
                lambda cluster, now: unplaced_on(cluster, report.server), STATE_MAX_AGE_S
            )
            place_jobs(self._manager, report.server, unplaced)
        if not report.runs:
            return
        runs = {run.key: run for run in report.runs}

        def view(cluster: ClusterState, now: float) -> tuple[bool, list[tuple[Allocation, RunReport, bool]]]:
            leased = list(jobs_on(cluster, report.server))
            left = [runs[key] for key in of_no_lease(cluster, runs, [key for key, _, _ in leased])]
            return any(is_key(run.key) and run.state == "running" and run.want != "stop" for run in left), [
                (serializers.allocation(cluster, lease), runs[key], is_due)
                for key, rank, lease in leased
                if key in runs and lease.places and _is_of_agents_alone(lease, runs[key])
                if is_there(report.here, lease.places[lease.ranks.index(rank) if lease.ranks else rank])
                if (is_due := _is_due(lease, now)) or not _goes_on(lease, runs[key], rank)
            ]

        is_to_stop, concerned = self._manager.read(view)
        if is_to_stop:  # a job that no lease has, as after a restore: its agent is told at once
            self._manager.stored_jobs.ring(report.server)
        for lease, run, is_due in concerned:
            runs_of_lease = LeaseRuns(self._manager, lease)
            if run.state == "running" and runs_of_lease.first_is_late:
                self._manager.stored_jobs.ring(lease["server_name"])
            with asked_by(f"agent:{report.server}"):
                try:
                    if run.walls:
                        self._store_walls(lease, run)
                    if run.state == "running" and (is_due or lease["state"] == "ERROR"):
                        self._manager.renew(
                            lease["task_id"],
                            fencing_token=lease["fencing_token"],
                            checkpoint_at=run.checkpoint_at,
                        )
                    elif run.state != "running" and runs_of_lease.is_over(run.model_dump()):
                        self._end(runs_of_lease, report, record)
                except ResourceManagerError as error:
                    logger.warning("the job of %s: %s", lease["name"], error)

    def _store_walls(self, lease: Allocation, run: RunReport) -> None:
        """Add the walls that a job got to its place, unless they are there."""
        places = [JobPlace(**stored) for stored in lease["job_places"]]
        number = [job.key for job in RunningJob.all_of(lease)].index(run.key)
        if not places[number].walls and not is_remainder(lease):
            places[number] = replace(places[number], walls=run.walls)
            self._manager.place_job(lease["task_id"], places, fencing_token=lease["fencing_token"])

    def _end(self, known: LeaseRuns, report: Report, record: Record) -> None:
        """Release a lease whose jobs are all over, with their result and those of its GPUs that are clean."""
        lease, runs = known.lease, known.by_key
        if not all(run is not None and known.is_over(run) for run in runs.values()):
            self._manager.stored_jobs.ring(*(member["server_name"] for member in lease["members"]))
            return
        ended = [run for run in runs.values() if run is not None]
        orders = self._manager.stored_jobs.orders(list(runs))  # what a gang's are before they are buried
        stopped = [
            run
            for run in ended
            if (run["ended"] and (run["state"] == "finished" or run["want"] == "stop"))
            or _is_end(orders.get(run["key"]))
        ]
        if any(_is_awaited(lease, run["ended_at"], report.at) for run in stopped):
            return  # who stopped it is about to release its lease
        failed = list(filter(was_refused, ended))
        is_stored = has_stored_job(lease["labels"])
        if not is_stored and any(run["state"] == "absent" for run in ended):  # nobody waits for it any more
            outcome, reason = Outcome.CANCELLED, ""
        elif failed:
            outcome, reason = Outcome.NOT_STARTED, as_reason(failed[0]["error"])
        elif all(run["exit_code"] == 0 for run in ended) and not is_remainder(lease):
            outcome, reason = Outcome.SUCCESS, ""
        elif lease["until"] is not None and all(
            run["preempted"] or known.was_preempted_before(run) for run in ended
        ):
            outcome, reason = Outcome.PREEMPTED if is_stored else Outcome.EVICTED, ""
        elif stopped:
            outcome, reason = Outcome.CANCELLED, ""
        else:
            outcome, reason = Outcome.FAILED, lease["gpu_failed"][:240]
        self._manager.release(
            lease["task_id"],
            fencing_token=lease["fencing_token"],
            outcome=outcome,
            job_end=JobEnd.ENDED,
            reason=reason,
            failed_nodes=[job.server for job in RunningJob.all_of(lease) if was_refused(runs[job.key])],
            result=end_of(ended) if is_stored else None,
            also=lambda cluster, now: cleaned(cluster, report, record, now),
        )


def _place_of(lease: Allocation, rank: int) -> dict[str, Any]:
    """Return where a member's job is, and may run, as an agent knows its own place; empty before that."""
    for member, stored in zip(lease["members"], lease["job_places"], strict=False):
        if member["rank"] == rank:
            return {"place": {name: stored[name] for name in ("machine", "folder", "mark")}}
    return {}


def _without_time(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the item without the grace that is left of a preemption: no question would be held in it."""
    return {**item, "grace_s": None} if item["want"] == "preempt" else item


def _is_left(lease: Allocation, run: Mapping[str, Any] | None) -> bool:
    """Return whether the terminal that showed a job is gone: it has not renewed the job's lease.

    How one has ended is read from its folder, which a stop removes.
    """
    is_over = run is not None and run["state"] == "finished"
    return lease["quarantined"] and lease["labels"].get("launcher") == TERMINAL and not is_over


def _has_begun(item: Mapping[str, Any], run: Mapping[str, Any] | None) -> bool:
    """Return whether the agent has done what is wanted: one who ordered it again waits for that number."""
    return run is not None and run["state"] != "absent" and item["n"] in ("", run["n"])


def _is_of_agents_alone(lease: Lease, run: RunReport) -> bool:
    """Return whether nobody else ends a lease: of a stored job, or left by the terminal that showed it."""
    labels = lease.request.labels
    is_left = lease.quarantined and labels.get("launcher") == TERMINAL and run.state != "running"
    return has_stored_job(labels) or is_left


def _is_forsaken(lease: Allocation, order: Mapping[str, Any] | None) -> bool:
    """Return whether a lease is preempted, and who would tell its job is gone, as while Airflow is stopped.

    They have not renewed it, or not ended it within its grace.
    """
    is_over = lease["preempted_by"] is not None and lease["quarantined"] and bool(lease["job_places"])
    return is_over and not has_stored_job(lease["labels"]) and (order is None or order["want"] in STARTS)


def _is_awaited(lease: Allocation, ended_at: float | None, now: float) -> bool:
    """Return whether who stopped a job has time to say so: while its lease lives, where it left no end."""
    return not lease["quarantined"] if ended_at is None else now < ended_at + STOPPED_S


def _is_end(order: Mapping[str, Any] | CorruptStateError | None) -> bool:
    """Return whether this is somebody's order to end a job, who then releases its lease."""
    return isinstance(order, Mapping) and order["want"] in ("terminate", "stop")


def _is_due(lease: Lease, now: float) -> bool:
    """Return whether half of a lease's time to live is over."""
    return lease.expires_at - now < lease.request.ttl_s / 2


def _goes_on(lease: Lease, run: RunReport, rank: int) -> bool:
    """Return whether nothing is to be done about a job that runs, of a lease that need not be renewed."""
    return (
        run.state == "running"
        and order_of(lease.request.labels) is StartupOrder.TOGETHER
        and not lease.quarantined
        and (not run.walls or bool(lease.places[rank].walls))
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one read of the state shows of a server: key, lease and rank of each job, and those unplaced.

    `left` are the jobs in its folder that no lease has, here or elsewhere.
    """

    version: int
    user: str
    jobs: list[tuple[str, Allocation, int]]
    left: list[str]
    unplaced: list[Allocation]

    @classmethod
    def of(cls, cluster: ClusterState, server: str, keys: Collection[str]) -> _Seen:
        jobs = [
            (key, serializers.allocation(cluster, lease), rank)
            for key, rank, lease in jobs_on(cluster, server)
        ]
        user = cluster.node(server).node.job_user
        left = of_no_lease(cluster, keys, [key for key, _, _ in jobs])
        return cls(cluster.version, user, jobs, left, unplaced_on(cluster, server))
