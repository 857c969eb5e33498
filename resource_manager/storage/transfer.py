"""The move of a state from one store to another through a file, which loses no running job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resource_manager.core.cluster import Snapshot
from resource_manager.errors import CorruptStateError, StaleStateError, StoreError, StoreMovedError
from resource_manager.storage import codec
from resource_manager.storage.base import Store
from resource_manager.storage.draft_file import create_draft


@dataclass(frozen=True, slots=True)
class Export:
    """A state as exported, the time of that by its store's clock, and the rows of the service's tokens."""

    snapshot: Snapshot
    exported_at: float
    tokens: tuple[dict[str, Any], ...] = ()


def export_state(store: Store, path: Path, to: str, tokens: Sequence[dict[str, Any]] = ()) -> Export:
    """Write the state to a file that only its owner may read, and mark it in the store as moved to `to`.

    The file is complete before the store is marked, both for the same version; it appears under its name
    afterwards. Exporting again is allowed. Raises `StoreError` and `OSError`.
    """
    while True:
        cluster = store.refresh(None)
        if cluster is None:
            raise StoreError("the store holds no state: there is nothing to export")
        exported = Export(cluster.snapshot(), store.now(), tuple(tokens))
        handle, draft = create_draft(path, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(_to_dict(exported), file, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
            store.move(cluster.version, to)
            draft.replace(path)
        except StaleStateError:
            continue  # a commit came in between: the file lacks it
        finally:
            draft.unlink(missing_ok=True)
        return exported


def read_export(path: Path) -> Export:
    """Return what `export_state` wrote; raises `CorruptStateError` and `OSError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        tokens = tuple(dict(row) for row in value["tokens"])
        return Export(codec.snapshot_from_dict(value["state"]), float(value["exported_at"]), tokens)
    except CorruptStateError as error:
        raise type(error)(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptStateError(f"{path} is not a file of gpu-manager store export") from error


def import_state(store: Store, exported: Export) -> float:
    """Write an exported state into an empty store and return the pause in seconds since the export.

    Leases end later by the pause, in which nobody could renew them. Into the store that it was exported from
    the state returns, which takes the mark back. Raises `StoreError` if the store holds another state.
    """
    pause_s = max(store.now() - exported.exported_at, 0.0)
    leases = tuple(
        replace(lease, expires_at=lease.expires_at + pause_s) for lease in exported.snapshot.leases
    )
    snapshot = replace(exported.snapshot, leases=leases)
    if store.initialise(snapshot):
        return pause_s
    cluster = store.refresh(None)
    version = None if cluster is None else cluster.version
    if version == snapshot.version and _is_moved(store, version):
        store.move(version, "")
        store.replace(snapshot)
        return pause_s
    raise StoreError(
        f"the store holds another state already (version {version}): import into an empty store or namespace"
    )


def _is_moved(store: Store, version: int) -> bool:
    try:
        store.commit(version, [], now=store.now())
    except StoreMovedError:
        return True
    except StaleStateError:
        return False
    return False


def _to_dict(exported: Export) -> dict[str, Any]:
    return {
        "exported_at": exported.exported_at,
        "state": codec.snapshot_to_dict(exported.snapshot),
        "tokens": exported.tokens,
    }
