"""Kills or stops this very process at a given commit: before, in the middle of, or right after it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

POINTS = {
    "redis": ("before", "sent", "answered"),
    "variables": ("before", "sent", "written", "answered"),
    "sql": ("before", "sent", "answered"),
}
"""`sent`: the script, or a task's message to its supervisor, has gone out and no answer was read; to a
database: the row is written and its transaction open, or the statements have gone out. `written`: committed
there, and not yet remembered in Redis. `answered`: all is done and the caller was not told."""


class CommitPoint:
    """Halts the process at `point` of the first of its commits from the `number`-th on that gets there.

    It sleeps for `sleep_s` seconds, or dies if that is 0; not any more once the file `stop` is there. Each
    time leaves a file in `halts`.
    """

    def __init__(self, point: str, number: int, sleep_s: float, halts: Path, stop: Path) -> None:
        self._point = point
        self._number = number
        self._sleep_s = sleep_s
        self._halts = halts
        self._stop = stop
        self._halted = False
        self._commits = count(1)
        self._here = threading.local()

    def arm_redis(self) -> None:
        from redis.connection import AbstractConnection

        from resource_manager.storage.redis.store import RedisStore

        self._surround(RedisStore, "commit", before="before", after="answered", is_commit=True)
        self._surround(AbstractConnection, "send_packed_command", after="sent", only=b"EVALSHA")

    def arm_sql(self) -> None:
        import pymysql
        from psycopg import Cursor

        from resource_manager.storage.sql.sqlite import SQLite
        from resource_manager.storage.sql.store import SqlStore

        self._surround(SqlStore, "commit", before="before", after="answered", is_commit=True)
        self._surround(Cursor, "_execute_send", after="sent")
        self._surround(Cursor, "_send_query_prepared", after="sent")
        self._surround(pymysql.connections.Connection, "_execute_command", after="sent")
        self._surround(SQLite, "_write", after="sent")

    def arm_variables(self) -> None:
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        from resource_manager.storage.airflow_variable.access import DatabaseAccess, TaskAccess
        from resource_manager.storage.airflow_variable.store import VariableStore

        self._surround(VariableStore, "commit", after="answered", is_commit=True)
        for way in (DatabaseAccess, TaskAccess):
            self._surround(way, "set", before="before", after="written")
        event.listen(Engine, "commit", lambda connection: self._reach("sent"))
        inner = TaskAccess._send

        def send(this: TaskAccess, message: Any, key: str) -> Any:
            if type(message).__name__ == "PutVariable" and self._is_due("sent"):
                from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS as comms

                comms.socket.sendall(comms._make_frame(message).as_bytes())
                self._reach("sent")
            return inner(this, message, key)

        TaskAccess._send = send  # type: ignore[assignment, method-assign]

    def _surround(
        self,
        owner: type,
        name: str,
        *,
        before: str = "",
        after: str,
        is_commit: bool = False,
        only: bytes = b"",
    ) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(this: Any, *args: Any, **options: Any) -> Any:
            if is_commit:
                self._here.due = next(self._commits) >= self._number
            self._reach(before)
            try:
                result = inner(this, *args, **options)
                if not only or only in b"".join(args[0]):
                    self._reach(after)
                return result
            finally:
                if is_commit:
                    self._here.due = False

        setattr(owner, name, outer)

    def _is_due(self, point: str) -> bool:
        due = point == self._point and getattr(self._here, "due", False) and not self._halted
        return due and not self._stop.exists()

    def _reach(self, point: str) -> None:
        if self._is_due(point):
            self._halted = True
            what = "stopped" if self._sleep_s else "killed"
            (self._halts / f"{os.getpid()}.{what} at a commit, {point}").touch()
            if self._sleep_s:
                wake = f"sleep {self._sleep_s}; kill -CONT {os.getpid()} 2> /dev/null"
                subprocess.Popen(["sh", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP if self._sleep_s else signal.SIGKILL)
