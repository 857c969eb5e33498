"""Exceptions; `ResourceManagerError` is the base class of all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from resource_manager import __version__
from resource_manager.words import Words

JOB_PLACED = "urn:gpu-manager:job-placed"
NO_LEASE = "urn:gpu-manager:no-lease"
TASK_TAKEN = "urn:gpu-manager:task-taken"
ALREADY_DONE = "urn:gpu-manager:already-done"
UNKNOWN_SERVER = "urn:gpu-manager:unknown-server"
SERVER_IN_USE = "urn:gpu-manager:server-in-use"
CLUSTER_CHANGED = "urn:gpu-manager:cluster-changed"
NOT_PREEMPTIBLE = "urn:gpu-manager:not-preemptible"
AMBIGUOUS_NAME = "urn:gpu-manager:ambiguous-name"
STORE_FULL = "urn:gpu-manager:store-full"
"""Problem types (RFC 9457), from which a client of the service recreates the error."""


NO_SERVERS = "no servers yet: gpu-manager apply FILE"


def place_in(location: Iterable[int | str]) -> list[str]:
    """Return the parts of a place in a value from outside, each without what could break a line."""
    named = [part for part in map(str, location) if part.isdigit() or (part and not _BRANCH.search(part))]
    return [part if part.isprintable() else ascii(part) for part in named]


_BRANCH = re.compile(r"[\[(<]|^((constrained-)?(int|float|str)|HealthEntry)$")
"""Parts of a place that name no part of the value, such as the branch of a union: no reader knows them."""


class ResourceManagerError(Exception):
    """Base class of every error that this project raises itself."""


class OutageError(ResourceManagerError):
    """A call that a store or service did not carry out, or nobody knows whether: it may be made again."""


class BusyError(OutageError):
    """A call that was refused as one too many of its caller's: there is room for it later."""


def is_outage(error: BaseException | None, kind: type[OutageError] = OutageError) -> bool:
    """Return True if the error is an outage of that kind, by default of any, or was caused by one."""
    return error is not None and (isinstance(error, kind) or is_outage(error.__cause__, kind))


class InvalidRequestError(ResourceManagerError, ValueError):
    """An invalid request: contradictory, or impossible in any state.

    `template` and `values` make its `words`; `field` is the parameter that is wrong, the first that they name
    if it is omitted.
    """

    def __init__(self, template: str | Words, *values: object, field: str | None = None) -> None:
        self.words = template if isinstance(template, Words) else Words(template, *values)
        super().__init__(str(self.words))
        self.field = self.words.first if field is None else field

    def rename(self, names: Mapping[str, str]) -> None:
        """Name the parameters otherwise in the words and in `field`."""
        self.words = self.words.renamed(names)
        self.args = (str(self.words),)
        self.field = names.get(self.field or "", self.field)


class PriorityError(InvalidRequestError):
    """A request whose priority is above `most`, which its caller may state at most."""

    def __init__(self, most: int, template: str | Words, *values: object) -> None:
        super().__init__(template, *values, field="priority")
        self.most = most


class NeverFitsError(InvalidRequestError):
    """A request within the limits that fits no server of the inventory, even an empty one.

    `grounds` are the facts, which the manager puts into words.
    """

    def __init__(self, words: str | Words = "", *, field: str | None = None, grounds: Any = None) -> None:
        super().__init__("{}" if isinstance(words, str) else words, words, field=field)
        self.grounds = grounds


class NoServersError(InvalidRequestError):
    """A request to a store whose cluster nobody has applied yet."""

    def __init__(self) -> None:
        super().__init__(NO_SERVERS)


class UnknownNodeError(InvalidRequestError):
    """A node name or server id that is not in the inventory, which has the servers `known`.

    Nearest names are looked for where its sentence is read: the decision that raises it holds up others.
    """

    _words: Words
    _known: Collection[str]

    def __init__(self, node: object, known: Collection[str] = (), *, field: str | None = None) -> None:
        name = "server" if field is None else Words.parameter(field)
        servers = "server" if len(known) == 1 else "servers"
        super().__init__(
            "{} {!r} is not in the inventory of {} {}", name, node, len(known), servers, field=field
        )
        self.node = node
        self._known = known

    @property
    def words(self) -> Words:
        """The sentence, with the servers that may be meant."""
        known, self._known = self._known, ()
        if known:
            self._words = Words("{}{}", self._words, _nearest(str(self.node), known))
            self.args = (str(self._words),)
        return self._words

    @words.setter
    def words(self, words: Words) -> None:
        self._words, self._known = words, ()

    def __str__(self) -> str:
        return str(self.words)


MAX_COMPARED = 1000
"""The most servers whose names are compared with a wrong one, which takes some 40 ms."""

MAX_LISTED = 5


def _nearest(name: str, known: Collection[str]) -> str:
    """Return which of the known servers the name may mean, all if they are few."""
    if len(known) <= MAX_COMPARED:
        from difflib import get_close_matches  # no call that goes well needs it

        if near := get_close_matches(name[:100], known):
            return f": did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"
    if len(known) <= MAX_LISTED:
        return f": it has {', '.join(known)}"
    return "; gpu-manager status lists them"


class DuplicateTaskError(InvalidRequestError):
    """A lease id that is in use for a request of another shape, or of another owner."""

    def __init__(self, lease_id: str, detail: str) -> None:
        super().__init__("task {!r} {}", lease_id, detail, field="lease_id")
        self.lease_id = lease_id


class CapacityError(ResourceManagerError):
    """A change that would allocate more than a node has free, or deallocate more than is allocated."""


class LeaseNotFoundError(ResourceManagerError):
    """No lease with that task id (and fencing token); `is_held`: there is one with another token."""

    def __init__(
        self, lease_id: str, fencing_token: int | None = None, *, is_held: bool = False, message: str = ""
    ) -> None:
        suffix = "" if fencing_token is None else f" with fencing token {fencing_token}"
        super().__init__(message or f"no live lease of task {lease_id!r}{suffix}")
        self.lease_id = lease_id
        self.fencing_token = fencing_token
        self.is_held = is_held


class AmbiguousNameError(ResourceManagerError):
    """A name that several leases or pending requests have; the message lists them with their short ids."""

    def __init__(self, name: str, count: int, matches: str) -> None:
        super().__init__(f"{name!r} names {count}: {matches}; say which by its short id")


class OtherOwnerError(ResourceManagerError):
    """A lease or pending request that belongs to another owner than the caller acts for."""

    def __init__(self, name: str, owner: str, asked_by: str | None) -> None:
        super().__init__(f"{name} belongs to {owner or 'no owner'}, not to {asked_by or 'no owner'}")


class JobPlacedError(ResourceManagerError):
    """A release of a lease whose job was placed, by somebody who does not know that the job is gone."""

    def __init__(self, lease_id: str, name: str, servers: Sequence[str], launcher: str) -> None:
        super().__init__(
            f"{name} has a job on {', '.join(servers)} (launcher {launcher}), whose GPUs must not be "
            "granted while it runs: stop it instead"
        )
        self.lease_id = lease_id


class ServerInUseError(ResourceManagerError):
    """A server that has leases, of which it must have none for this change."""

    def __init__(self, server: str, names: Sequence[str]) -> None:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        many = "1 lease" if len(names) == 1 else f"{len(names)} leases"
        super().__init__(
            f"server {server!r} has {many} ({shown}): drain it, and repeat this once they have ended"
        )
        self.server = server


class NotPreemptibleError(ResourceManagerError):
    """A lease that is not taken: it must not be, or no pending request would start for it."""


class IdempotencyKeyError(ResourceManagerError):
    """An idempotency key that another request has used."""


class KeysFullError(ResourceManagerError):
    """A request under an idempotency key whose caller has the most of them kept already."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"{most:,} idempotency keys of yours are kept, each for a day, the most for one caller: "
            "try again later, or leave the key out"
        )


class AlreadyDoneError(ResourceManagerError):
    """A request that was carried out before, under the same idempotency key, and whose lease has ended."""


class PolicyError(ResourceManagerError):
    """A placement policy or queue order that is unknown or violated its contract."""


class ClusterFileError(ResourceManagerError, ValueError):
    """An invalid file of the cluster; the message names file, line, column and reason."""


class ClusterChangedError(ResourceManagerError):
    """A cluster that somebody changed since the difference that is to be applied was shown."""


class SettingsError(ResourceManagerError, ValueError):
    """An invalid setting; the message names the setting and its valid values."""


class StoreError(ResourceManagerError):
    """A failed operation of the store; subclasses give the reason."""


class StoreUnavailableError(StoreError, OutageError):
    """The store cannot be reached; no change is known to have been made."""


class StoreFullError(StoreUnavailableError):
    """The store's memory is full: leases can be renewed and ended, but no write that needs memory is made."""


class StoreRefusedError(StoreUnavailableError):
    """The store refuses the login, or its user lacks rights: it will until somebody corrects that."""


def is_login_refused(error: BaseException) -> bool:
    """Return whether the store refuses its user, or the service the token."""
    return is_outage(error, StoreRefusedError) or getattr(error, "status", None) == 401


class StaleStateError(StoreError, OutageError):
    """The state changed since it was read; nothing was written.

    `missed` holds the changes from version `expected` to `actual` if the store had them available: applying
    them to the replica saves a read.
    """

    def __init__(
        self, expected: int, actual: int | None, detail: str = "", *, missed: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(
            detail or f"the state changed: expected version {expected}, found {actual}; read again and retry"
        )
        self.expected = expected
        self.actual = actual
        self.missed = missed


class RepeatedError(StoreError):
    """A commit refused because one of its idempotency keys is known: `stored` is what was kept under it."""

    def __init__(self, key: object, stored: str) -> None:
        super().__init__("the change was made before, under the same idempotency key")
        self.key = key
        self.stored = stored


class LockedError(StaleStateError):
    """Another client holds the lock, so only that client may commit now; nothing was written."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected, None, "another client holds the lock; acquire it first")


class CorruptStateError(StoreError):
    """The stored document cannot be read; it was left unchanged."""


class NewerFormatError(CorruptStateError):
    """A newer version of this software wrote the state; it was left unchanged."""


class StateLostError(StoreError):
    """The store went back in time or was emptied; nothing is granted until an operator has checked it."""


class StateReplacedError(StateLostError):
    """The store holds another state than was read from it before: no lease of that one is in it."""


class StateClosedError(StoreError):
    """The state was closed by a final backup: it goes on where that is restored, and takes no commit here."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")


class BackupRefusedError(StoreError):
    """There is nothing to back up, or a restore would lose leases of the store; nothing was changed."""


class StateUnconfirmedError(StoreError):
    """The store restarted or failed over, or its clock jumped by `clock_jump_s` seconds.

    Nothing is granted and nothing expires until owners could renew their leases.
    """

    def __init__(self, message: str, *, remaining_s: float, clock_jump_s: float = 0.0) -> None:
        super().__init__(message)
        self.remaining_s = remaining_s
        self.clock_jump_s = clock_jump_s


class LockError(ResourceManagerError):
    """The lock was lost or used wrongly."""


class LockTimeoutError(LockError, OutageError):
    """The lock could not be acquired within the allowed time."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"the lock was busy for {waited_s:g} s; nothing was changed, try again")
        self.waited_s = waited_s


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of `pyproject.toml`, from the wheel."""
    return f"pip install 'gpu_resource_manager-{__version__}-py3-none-any.whl[{extra}]'"


def redact(url: str) -> str:
    """Return the URL without its password and query."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    before_query, _, query = rest.partition("?")
    if "@" not in before_query and "@" in unquote(query):
        # Perhaps a password with an unescaped question mark.
        return f"{scheme}{separator}…"
    login, at, place = before_query.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{place}"
