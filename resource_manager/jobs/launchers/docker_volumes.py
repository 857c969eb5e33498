"""Volumes of a Docker engine that outlive a job's container, and what they say of the job."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from resource_manager.jobs.directories.job_files import ENDED_S, lease_of_key

KILL_AT_LABEL = "gpu-manager.kill-at"
"""Label of the volumes that say until when, in seconds since the epoch, a preempted job has its grace."""

ENDED_LABEL = "gpu-manager.ended"
"""Label of the volumes that are tombstones of jobs."""


def volume_of(key: str) -> str:
    """Return the name of the volume that all leases of the same id and rank share."""
    return f"{lease_of_key(key)}-kept"


def bury(api: Any, key: str) -> None:
    """Make the job's tombstone, a volume that says for a day that the job was stopped."""
    api.create_volume(f"{key}-ended", labels={ENDED_LABEL: key})


def is_buried(api: Any, key: str) -> bool:
    """Return True if the job has a tombstone."""
    return _labels(api, f"{key}-ended") is not None


def prune_tombstones(api: Any, engine: Mapping[str, Any]) -> None:
    """Remove the tombstones that are older than a day when the engine says that of itself.

    So are notes of a grace whose container is gone: another than a launcher may have removed it.
    """
    from docker.errors import NotFound

    now = datetime.fromisoformat(engine["SystemTime"]).timestamp()
    for label in (ENDED_LABEL, KILL_AT_LABEL):
        for volume in api.volumes(filters={"label": label})["Volumes"] or ():
            if datetime.fromisoformat(volume["CreatedAt"]).timestamp() >= now - ENDED_S:
                continue
            if label == KILL_AT_LABEL and _has_container(api, volume["Name"].removesuffix("-told")):
                continue
            with suppress(NotFound):  # another process prunes, too
                api.remove_volume(volume["Name"])


def has_noted_grace(api: Any, key: str, kill_at: float) -> bool:
    """Note when the grace of a job's preemption is over; return False if there is no room for that."""
    from docker.errors import APIError

    try:
        api.create_volume(f"{key}-told", labels={KILL_AT_LABEL: str(kill_at)})
    except APIError:
        return False
    return True


def kill_at_of(api: Any, key: str) -> float | None:
    """Return when the grace is over that the job was given, None if the job was not told."""
    labels = _labels(api, f"{key}-told")
    return None if labels is None else float(labels[KILL_AT_LABEL])


def forget_grace(api: Any, key: str) -> None:
    """Remove what `has_noted_grace` noted, if it did."""
    from docker.errors import NotFound

    with suppress(NotFound):
        api.remove_volume(f"{key}-told")


def _has_container(api: Any, key: str) -> bool:
    from docker.errors import NotFound

    try:
        api.inspect_container(key)
    except NotFound:
        return False
    return True


def _labels(api: Any, name: str) -> Mapping[str, str] | None:
    """Return the labels of a volume, None if there is none of that name."""
    from docker.errors import NotFound

    try:
        return api.inspect_volume(name)["Labels"] or {}
    except NotFound:
        return None
