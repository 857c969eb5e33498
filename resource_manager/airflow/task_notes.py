"""Notes that tell waiting from training on the pages of Airflow's tasks.

The API server writes them, since neither a task nor a trigger can. A user's note is left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

from resource_manager.airflow.links import console_url
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, PendingRequest, Placement, Request
from resource_manager.core.names import Named, name_of
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.serializers import duration
from resource_manager.scheduling.preemption import restarts_of
from resource_manager.storage import Store

logger = logging.getLogger(__name__)

AUTHOR = "gpu_resource_manager"
"""User of our notes."""

POLL_S = 2.0
OUTAGE_S = 60.0
MAX_PLACES = 8
"""Most servers that a note names; Airflow keeps 1000 characters."""


class TaskNotes:
    """Notes of one Airflow's tasks, kept equal to the state of the store."""

    def __init__(self, store: Store, instance: str) -> None:
        self._store = store
        self._instance = instance
        self._replica: ClusterState | None = None
        self._version = -1
        self._leases: dict[TaskIdentity, Lease] = {}
        self._written: dict[TaskIdentity, str] = {}

    def run(self) -> None:
        """Write notes until the process ends; an error ends neither it nor the API server."""
        while True:
            try:
                self.update()
            except Exception as error:
                logger.warning("the notes of tasks with GPUs are not up to date: %s", error)
                time.sleep(OUTAGE_S)
            time.sleep(POLL_S)

    def update(self) -> None:
        """Write the notes of the tasks whose lease or pending request has changed since the last call."""
        cluster = self._replica = self._store.refresh(self._replica)
        if cluster is None or cluster.version == self._version:
            return
        leases = {
            identity: lease
            for lease in cluster.leases.values()
            if (identity := self._own(lease.request)) is not None
        }
        notes = {
            identity: describe_pending(entry)
            for entry in cluster.pending.values()
            if (identity := self._own(entry.request)) is not None
        }
        notes |= {identity: describe_lease(lease) for identity, lease in leases.items()}
        now = self._store.now()
        ended = {
            identity: describe_lease(lease, ended_at=now)
            for identity, lease in self._leases.items()
            if identity not in notes
        }
        changed = {i: note for i, note in notes.items() if self._written.get(i) != note}
        write(changed | ended)
        self._leases, self._written, self._version = leases, notes, cluster.version

    def _own(self, request: Request) -> TaskIdentity | None:
        identity = TaskIdentity.from_labels(request.labels)
        return identity if identity is not None and identity.instance == self._instance else None


def describe_pending(entry: PendingRequest) -> str:
    """Return the note of a task whose request waits."""
    request = entry.request
    gpus = f"{request.gpus} GPU{'' if request.gpus == 1 else 's'}"
    each = f" on each of {request.nodes} servers" if request.nodes > 1 else ""
    return f"**Waiting** for {gpus}{each} since {_time(entry.queued_at)}. Why and until when: {_link(entry)}"


def describe_lease(lease: Lease, ended_at: float | None = None) -> str:
    """Return the note of a task that has GPUs, or had them until `ended_at`."""
    does, did = ("Training", "Trained") if "launcher" in lease.request.labels else ("Holding", "Held")
    places = [_place(member) for member in lease.members[:MAX_PLACES]]
    if further := len(lease.members) - len(places):
        places.append(f"{further} more servers")
    begun = _time(lease.granted_at)
    when = f"since {begun}" if ended_at is None else f"from {begun} to {_time(ended_at)}"
    # A preempted request keeps its time of arrival, and its job ran since then.
    has_run = restarts_of(lease.request.labels) > 0
    waited_s = 0.0 if lease.queued_at is None or has_run else lease.granted_at - lease.queued_at
    waited = f", after {duration(waited_s)} of waiting" if waited_s >= 1 else ""
    verb = does if ended_at is None else did
    return f"**{verb}** on {'; '.join(places)} {when}{waited}. {_link(lease)}"


def _place(member: Placement) -> str:
    ids = ", ".join(map(str, member.gpu_ids))
    return f"GPU{'' if len(member.gpu_ids) == 1 else 's'} {ids} of {member.node}" if ids else member.node


def write(notes: Mapping[TaskIdentity, str]) -> None:
    """Write these notes into Airflow's database, but for tasks that are gone or have a note of a user."""
    from airflow.models.taskinstance import TaskInstance, TaskInstanceNote
    from airflow.utils.session import create_session
    from sqlalchemy import select
    from sqlalchemy.exc import IntegrityError

    for identity, text in notes.items():
        # Another process of the API server may write the same note at the same time.
        with suppress(IntegrityError), create_session() as session:
            found = session.execute(
                select(TaskInstance.id, TaskInstanceNote)
                .outerjoin(TaskInstanceNote, TaskInstanceNote.ti_id == TaskInstance.id)
                .where(
                    TaskInstance.dag_id == identity.dag_id,
                    TaskInstance.run_id == identity.run_id,
                    TaskInstance.task_id == identity.task_id,
                    TaskInstance.map_index == identity.map_index,
                )
            ).first()
            if found is None:
                continue
            task_instance_id, note = found
            if note is None:
                note = TaskInstanceNote(content=text, user_id=AUTHOR)
                note.ti_id = task_instance_id
                session.add(note)
            elif note.user_id == AUTHOR:
                note.content = text


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%d %b %H:%M} UTC"


def _link(entry: Named) -> str:
    return f"[`{name_of(entry)}` in the GPU console]({console_url(entry.lease_id)})"
