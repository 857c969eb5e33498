"""What a Redis lacks to serve as a store, as far as the user of the store may ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import redis

from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import check_format
from resource_manager.storage.finding import Finding, of_clock
from resource_manager.storage.redis.client import RedisClient


def rights(client: RedisClient) -> Iterator[Finding]:
    """Try what the store needs, in a way that changes nothing."""
    key = client.key("check")
    tried = {
        "+time": ("TIME",),
        "+info": ("INFO", "server"),
        "+@read": ("GET", key),
        "+@write": ("DEL", key),
        "+eval": ("EVAL", "return redis.call('DEL', KEYS[1])", 1, key),
    }
    lacking = [right for right, command in tried.items() if _is_denied(client, command)]
    if lacking:
        lack = ", ".join(lacking)
        yield Finding(False, f"the user lacks {lack}: in redis-cli, ACL SETUSER <name> {client.access_rule}")
    else:
        yield Finding(True, "the user has all rights that the store needs")
        if client.may_flush():
            yield Finding(
                False,
                "this service's user may run FLUSHALL or SWAPDB, which affect every namespace; "
                "give it one of its own: in redis-cli, ACL SETUSER <name> reset on >PASSWORD "
                f"{client.access_rule} (see docs/stores.md)",
                is_caution=True,
            )


def version(client: RedisClient) -> Iterator[Finding]:
    found = _info(client, "server").get("redis_version", "")
    if found:
        numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
        yield Finding(numbers >= (6, 2), f"Redis {found}; 6.2 or newer is needed")
    if _info(client, "replication").get("role") == "slave":
        yield Finding(False, "it is a replica, which is read-only: connect to the primary")


def eviction(client: RedisClient) -> Iterator[Finding]:
    policy = _info(client, "memory").get("maxmemory_policy")
    if policy is None:
        return
    yield Finding(
        policy == "noeviction",
        f"maxmemory-policy {policy}"
        + ("" if policy == "noeviction" else ": it may drop leases; set noeviction in redis.conf"),
    )


def persistence(client: RedisClient) -> Iterator[Finding]:
    found = _info(client, "persistence")
    if found.get("aof_enabled") == "0":
        yield Finding(
            False, "appendonly no: a restart loses leases whose jobs run; set appendonly yes in redis.conf"
        )
    elif "aof_enabled" in found:
        yield Finding(True, "appendonly yes")
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if found.get(name, "ok") != "ok":
            yield Finding(False, f"{name} {found[name]}: it cannot write to its disk, see its log")


def clock(client: RedisClient) -> Iterator[Finding]:
    if _is_denied(client, ("TIME",)):
        return
    yield of_clock(client.time())


def state(client: RedisClient) -> Iterator[Finding]:
    command = ("HMGET", client.key("meta"), "format", "closed")
    if _is_denied(client, command):
        return
    with client.reporting():
        [(stored, closed)] = client.ask(command)
    try:
        check_format(
            1 if stored is None else stored.decode(errors="replace"),
            f"the state of namespace {client.namespace}",
        )
    except CorruptStateError as error:
        yield Finding(False, str(error))
    if closed:
        yield Finding(False, f"the state is closed: {closed.decode(errors='replace')}")


CHECKS_OF_LOCK = (rights, version, clock)
"""Checks of a Redis that has lock and clock of a state kept elsewhere."""

CHECKS = (*CHECKS_OF_LOCK, eviction, persistence, state)


def _is_denied(client: RedisClient, command: tuple[Any, ...]) -> bool:
    with suppress(CorruptStateError), client.reporting():
        try:
            client.ask(command)
        except redis.exceptions.NoPermissionError:
            return True
        except redis.exceptions.ResponseError as error:  # in a script before Redis 7
            return "executing the script can't" in str(error)
    return False


def _info(client: RedisClient, section: str) -> dict[str, str]:
    """Return a section of what Redis tells of itself, nothing where the user may not ask."""
    if _is_denied(client, ("INFO", section)):
        return {}
    with client.reporting():
        [found] = client.ask(("INFO", section))
    text = found.decode(errors="replace") if isinstance(found, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
