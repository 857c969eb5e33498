"""One tree of errors: catch `ResourceManagerError` to catch them all."""

from __future__ import annotations

from typing import Any

NO_LEASE = "urn:gpu-manager:no-lease"
TASK_TAKEN = "urn:gpu-manager:task-taken"
UNKNOWN_SERVER = "urn:gpu-manager:unknown-server"
STORE_FULL = "urn:gpu-manager:store-full"
"""Problem types (RFC 9457): by them a service's client knows which of these errors it was."""


class ResourceManagerError(Exception):
    """Root of every error this project raises itself."""


class InvalidRequestError(ResourceManagerError, ValueError):
    """A request that no state could ever satisfy, or that makes no sense."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NeverFitsError(InvalidRequestError):
    """A request within the limits that no server of the inventory could take, were it empty."""


class UnknownNodeError(InvalidRequestError):
    """A node name or server id that is not in the inventory."""

    def __init__(self, node: object, known: int, *, field: str | None = None) -> None:
        super().__init__(
            f"{field or 'server'} {node!r} is not in the inventory of {known} servers", field=field
        )
        self.node = node


class DuplicateTaskError(InvalidRequestError):
    """A task id that already holds or waits for something of another shape."""

    def __init__(self, task_id: str, detail: str) -> None:
        super().__init__(f"task {task_id!r} {detail}", field="task_id")
        self.task_id = task_id


class CapacityError(ResourceManagerError):
    """A change that would book more than a node has, or free what is not held."""


class LeaseNotFoundError(ResourceManagerError):
    """No live lease with that task id (and fencing token)."""

    def __init__(self, task_id: str, fencing_token: int | None = None) -> None:
        suffix = "" if fencing_token is None else f" with fencing token {fencing_token}"
        super().__init__(f"no live lease of task {task_id!r}{suffix}")
        self.task_id = task_id
        self.fencing_token = fencing_token


class PolicyError(ResourceManagerError):
    """A placement policy or queue order that is unknown or broke its contract."""


class InventoryError(ResourceManagerError, ValueError):
    """A wrong inventory file; the message names file, line and reason."""


class SettingsError(ResourceManagerError, ValueError):
    """A wrong setting; the message names the setting and what it takes."""


class StoreError(ResourceManagerError):
    """The store did not do what was asked; subclasses say why."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached; nothing was changed as far as is known."""


class StoreFullError(StoreUnavailableError):
    """The store's memory is full: leases can be renewed and ended, nothing that needs memory was written."""


class StaleStateError(StoreError):
    """The state moved on since it was read; nothing was written.

    `missed` holds the changes from version `expected` to `found` where the store had them at hand: applied
    to the replica they spare a read.
    """

    def __init__(
        self, expected: int, found: int | None, detail: str = "", *, missed: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(
            detail or f"the state moved on: expected version {expected}, found {found}; read again and retry"
        )
        self.expected = expected
        self.found = found
        self.missed = missed


class LockedError(StaleStateError):
    """Another holds the lock, so only that one may commit now; nothing was written."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected, None, "another holds the lock; take it first")


class CorruptStateError(StoreError):
    """The stored document cannot be read; it was left as it is."""


class NewerFormatError(CorruptStateError):
    """A newer version of this software wrote the state; it was left as it is."""


class StateLostError(StoreError):
    """The store went back in time or was emptied; nothing is granted until an operator has looked at it."""


class StateUnconfirmedError(StoreError):
    """The store was restarted or failed over: nothing is granted until owners have renewed their leases."""

    def __init__(self, message: str, *, rest_s: float) -> None:
        super().__init__(message)
        self.rest_s = rest_s


class LockError(ResourceManagerError):
    """The lock was lost or used wrongly."""


class LockTimeoutError(LockError):
    """The lock could not be had within the time allowed."""

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(f"lock {name!r} was not free within {waited_s:g} s")
        self.name = name
        self.waited_s = waited_s
