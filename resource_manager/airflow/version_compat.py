"""Names whose place or form differs between Airflow 3.0 and 3.3.

It imports Airflow only, so that every package may use it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

try:  # since 3.2
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSkipException,
        AirflowTaskTerminated,
        AirflowTaskTimeout,
        DownstreamTasksSkipped,
        TaskDeferred,
    )

    THREADS_MAY_ASK = True
    """True if any thread of a triggerer may use the execution API; before 3.2 the answers were mixed up."""
except ImportError:
    from airflow.exceptions import (  # type: ignore[attr-defined, no-redef]
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSkipException,
        AirflowTaskTerminated,
        AirflowTaskTimeout,
        DownstreamTasksSkipped,
        TaskDeferred,
    )

    THREADS_MAY_ASK = False

try:  # since 3.1
    from airflow.sdk import BaseHook
except ImportError:
    from airflow.hooks.base import BaseHook  # type: ignore[attr-defined, no-redef]

R = TypeVar("R")

__all__ = [  # of Airflow's
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowRescheduleException",
    "AirflowSkipException",
    "AirflowTaskTerminated",
    "AirflowTaskTimeout",
    "BaseHook",
    "DownstreamTasksSkipped",
    "TaskDeferred",
]


def is_first_try_since_cleared(task_instance: Any, retries: int) -> bool:
    """Return whether the task instance was cleared and this is its first try since.

    Clearing sets the last try allowed to `retries` after those made so far, as of every Airflow 3.
    """
    first: int = task_instance.max_tries - retries + 1
    return first > 1 and task_instance.try_number == first


async def in_thread(
    function: Callable[..., R], *args: Any, executor: ThreadPoolExecutor | None = None, **options: Any
) -> R:
    """Call a function that may ask Airflow in another thread, from a trigger."""
    call = partial(function, *args, **options)
    if THREADS_MAY_ASK:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, call)
    from asgiref.sync import sync_to_async  # so that Airflow asks in the event loop of the trigger

    return await sync_to_async(call, thread_sensitive=False, executor=executor)()


def of_same_loop() -> Callable[[], None]:
    """Return what another thread calls first so that it may ask Airflow: in this thread's event loop.

    That is the trigger's, also in a thread of `in_thread`.
    """
    if THREADS_MAY_ASK:
        return lambda: None
    from asgiref.sync import SyncToAsync

    ours = SyncToAsync.threadlocal
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        loop = getattr(ours, "main_event_loop", None)

    def enter() -> None:
        ours.main_event_loop, ours.main_event_loop_pid = loop, os.getpid()

    return enter


def task_that_may_ask(awaitable: Awaitable[R]) -> asyncio.Task[R]:
    """Run it in a task whose synchronous code may ask Airflow as that of the running one may, in a trigger.

    Since 3.1 Airflow gives each trigger's own task a portal of `greenback` for that, which is not inherited.
    """
    task = asyncio.ensure_future(awaitable)
    greenback = sys.modules.get("greenback")
    if greenback is not None and greenback.has_portal():
        greenback.bestow_portal(task)
    return task


async def set_xcom(key: str, value: Any, **task_instance: Any) -> None:
    """Store a JSON value as XCom of a task instance, from a trigger."""
    from airflow.sdk.execution_time.xcom import XCom

    if hasattr(XCom, "aset"):  # since 3.3
        await XCom.aset(key, value, **task_instance)
    else:
        await in_thread(XCom.set, key, value, **task_instance)


async def get_xcom(key: str, **task_instance: Any) -> Any:
    """Return the XCom of a task instance, or None, in a trigger."""
    from airflow.sdk.execution_time.xcom import XCom

    if hasattr(XCom, "aget_one"):  # since 3.3
        return await XCom.aget_one(key=key, **task_instance)
    return await in_thread(XCom.get_one, key=key, **task_instance)


async def user_of(request: Any, bearer: Any) -> Any:
    """Return Airflow's user of a request to the API server: by bearer token, else by the cookie of the page.

    Raises `fastapi.HTTPException` with status 401 for an unknown one.
    """
    from airflow.api_fastapi.core_api import security
    from fastapi import HTTPException

    try:
        if hasattr(security, "resolve_user_from_token"):  # since 3.1
            return await security.get_user(request, None, bearer)
        token = bearer.credentials if bearer else request.cookies.get("_token")
        if not token:
            raise HTTPException(401, "Not authenticated")
        return await security.get_user(token)
    except HTTPException as error:  # Airflow answers 403 to a wrong token, as to a user without the right
        raise HTTPException(401, error.detail) from error
