"""Errors of Redis and its driver in plain words."""

from __future__ import annotations

import redis
from redis.sentinel import MasterNotFoundError

from resource_manager import errors
from resource_manager.storage.outage import outage

MEMORY_FULL = (
    "its memory is full: leases can be renewed and released and requests cancelled, but nothing new is "
    "accepted; raise maxmemory or delete other data"
)

_CLUSTER_DOWN = "its Redis Cluster is down: see CLUSTER INFO in redis-cli"
_WRONG_LOGIN = "it refused the login: check user and password in the URL"
_NO_LOGIN = "it requires a login: put user and password into the URL"
_NOT_ALLOWED = "its user lacks rights: grant the rights in docs/stores.md"

_ADVICE = (
    ("invalid username-password pair", _WRONG_LOGIN),
    ("HELLO must be called", _NO_LOGIN),
    ("Authentication required", _NO_LOGIN),
    ("has no permissions", _NOT_ALLOWED),
    ("The user executing the script can't", _NOT_ALLOWED),
    ("read only replica", "it is read-only: connect to the primary"),
    ("MISCONF", "it cannot write to its disk and refuses writes: see its log"),
    ("NOREPLICAS", "it has too few replicas and refuses writes: see min-replicas-to-write in its redis.conf"),
    ("loading the dataset", "it is still loading its data: try again shortly"),
    ("MASTER is down", "it is a replica that has lost its primary: connect to the primary"),
    ("max number of clients", "it has no connection left: raise maxclients"),
    ("Hash slot not served", _CLUSTER_DOWN),
    ("The cluster is down", _CLUSTER_DOWN),
    ("BUSY", "a script keeps it busy: wait for it, or end it by SCRIPT KILL in redis-cli"),
    ("as reply type byte", "it is no Redis: check its port"),
    ("unknown command 'SENTINEL'", "it is no sentinel: name the sentinels, or its own redis:// URL"),
    (
        "unknown command 'EVALSHA'",
        "it has no EVALSHA: name sentinels as redis+sentinel://, else undo its renaming",
    ),
)
"""Explanation of a server error by words in its text, from which the driver has often taken the code."""

_REFUSALS = {_WRONG_LOGIN, _NO_LOGIN, _NOT_ALLOWED}


def error_of(error: redis.RedisError, address: str, namespace: str, timeout_s: float) -> errors.StoreError:
    """Return the one-line error for one of the driver, which waited for an answer for at most `timeout_s`."""
    text = " ".join(str(error).partition(", with args beginning")[0].split())
    if "WRONGTYPE" in text:
        return errors.CorruptStateError(
            f"{address}: a key of {{{namespace}}} has the wrong type; another program uses this namespace"
        )
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command" in text:
        return outage(f"{address}: {MEMORY_FULL}", errors.StoreFullError)
    hint = ""
    if isinstance(error, redis.TimeoutError) and "rediss://" in address:
        hint = "; if it has no TLS, its address begins with redis://"
    elif ("reset by peer" in text or "closed by server" in text) and "redis://" in address:
        hint = "; if it has TLS, its address begins with rediss://"
    reason = _explain(error, text, timeout_s)
    kind = errors.StoreRefusedError if reason in _REFUSALS else errors.StoreUnavailableError
    return outage(f"{address}: {reason}{hint}", kind)


def _explain(error: redis.exceptions.RedisError, text: str, timeout_s: float) -> str:
    for code, advice in _ADVICE:
        if code in text:
            return advice
    if isinstance(error, redis.exceptions.AuthenticationError):
        return f"it refused the login: {text}"
    if isinstance(error, redis.exceptions.MovedError):
        return f"its Redis Cluster keeps this state elsewhere: connect to {error.host}:{error.port}"
    if isinstance(error, redis.exceptions.TimeoutError):
        return f"it did not answer within {timeout_s:g} s ({text})"
    if isinstance(error, MasterNotFoundError):  # its text is a dump of the driver's objects
        return "no sentinel that answers knows the primary: check their addresses and the service's name"
    if isinstance(error, redis.exceptions.ConnectionError):
        return f"cannot be reached ({text})"
    return f"it refused the operation ({text})"
