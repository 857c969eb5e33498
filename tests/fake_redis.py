"""A Redis within this process, for a test where no server can be started.

It imitates commands, scripts and the clock of one server. What it cannot is left to real ones: restart (the
run id never changes), persistence, full memory, rights of users, replicas, sentinels, clusters, broken
connections, and clients in several processes.
"""

from __future__ import annotations

from typing import Any

import redis
from fakeredis import FakeRedisConnection, FakeServer
from fakeredis._commands import command
from fakeredis.commands_mixins.server_mixin import ServerCommandsMixin

from resource_manager.storage.redis.client import RedisClient


@command((), (bytes,))
def info(self: Any, *sections: bytes) -> bytes:
    """Say what the scripts read, for fakeredis does not know this command."""
    return b"# Server\r\nredis_version:7.0.0\r\nrun_id:0\r\n"


ServerCommandsMixin.info = info  # type: ignore[attr-defined]


class InProcess(redis.ConnectionPool):
    """Pool of another class than the driver's, whose connections the client would write to directly."""


class FakeRedis:
    """A server with an empty state, and its clients."""

    def __init__(self) -> None:
        self._server = FakeServer(version=(7,))

    def client(self) -> RedisClient:
        pool = InProcess(connection_class=FakeRedisConnection, server=self._server, socket_timeout=5.0)
        return RedisClient(redis.Redis(connection_pool=pool), "Redis within this process")
