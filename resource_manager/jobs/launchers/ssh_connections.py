"""Connections by ssh that stay open between commands: a log-in takes longer than a command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_SESSIONS = 8
"""Most sessions of a connection, each with one command; OpenSSH's server allows 10 (MaxSessions)."""

IDLE_S = 60.0
"""Time for which a connection without a session stays open: the next job comes soon."""

MAX_AGE_S = 600.0
"""Age from which a connection takes no further sessions: its credentials may have changed."""

OPEN_TIMEOUT_S = 10.0
"""Time after which a server that opens no session on a connection is taken to have lost it."""


@dataclass(eq=False, slots=True)
class _Connection:
    client: Any
    transport: Any
    sessions: int = 1
    is_retired: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_usable(self) -> bool:
        is_old = time.monotonic() - self.opened_at > MAX_AGE_S
        return not self.is_retired and not is_old and self.transport.is_active()


class SSHConnections:
    """Connections to one server as one user, for any number of threads; `host` is its name for messages.

    `connect` logs in and returns a client of paramiko's; there is one log-in at a time. A connection takes
    `MAX_SESSIONS` sessions at once. Once a session could not be opened or ended with an error, it takes no
    further ones, and those that it has go on.
    """

    def __init__(self, host: str, connect: Callable[[], Any]) -> None:
        self.host = host
        self._connect = connect
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._login: Future[None] | None = None
        self._timer: threading.Timer | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that can be used."""
        return any(connection.is_usable for connection in self._connections)

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Yield the channel of a new session, which ends with the block.

        One that was lost while nobody used it is replaced. Raises what `connect` or paramiko raises.
        """
        connection, channel = self._open()
        try:
            yield channel
        except BaseException:
            connection.is_retired = True
            raise
        finally:
            channel.close()
            self._give_back(connection)

    def close(self) -> None:
        """Close the connections, each once its last session is over."""
        with self._lock:
            for connection in self._connections:
                connection.is_retired = True
        self._close_unused()

    def _open(self) -> tuple[_Connection, Any]:
        while True:
            connection, is_new = self._take()
            try:
                return connection, connection.transport.open_session(timeout=OPEN_TIMEOUT_S)
            except BaseException as error:  # lost, or the server allows fewer sessions
                connection.is_retired = True
                self._give_back(connection)
                if is_new or not isinstance(error, Exception):
                    raise

    def _take(self) -> tuple[_Connection, bool]:
        """Return a connection for one more session, and whether it was opened for that."""
        while True:
            with self._lock:
                for connection in self._connections:
                    if connection.sessions < MAX_SESSIONS and connection.is_usable:
                        connection.sessions += 1
                        return connection, False
                if (login := self._login) is None:
                    own = self._login = Future()
                    break
            login.result()
        try:
            client = self._connect()
            connection = _Connection(client, client.get_transport())
        except BaseException as error:
            self._login = None
            own.set_exception(error)
            raise
        with self._lock:
            self._connections.append(connection)
            self._login = None
        own.set_result(None)
        return connection, True

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            connection.sessions -= 1
            connection.used_at = time.monotonic()
        self._close_unused()

    def _close_unused(self) -> None:
        """Close what is of no more use now, and look again once another connection has been idle for long."""
        now = time.monotonic()
        with self._lock:
            unused = [
                connection
                for connection in self._connections
                if connection.sessions == 0
                and (now - connection.used_at >= IDLE_S or not connection.is_usable)
            ]
            self._connections = [each for each in self._connections if each not in unused]
            idle = [each.used_at for each in self._connections if each.sessions == 0]
            if idle and self._timer is None:
                self._timer = threading.Timer(min(idle) + IDLE_S - now, self._look_again)
                self._timer.daemon = True
                self._timer.start()
        for connection in unused:
            connection.client.close()

    def _look_again(self) -> None:
        self._timer = None
        self._close_unused()
