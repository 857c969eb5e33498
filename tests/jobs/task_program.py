"""One try of a task in a process of its own: python -m tests.jobs.task_program KIND TRY

It goes through the operator's steps and triggers as Airflow does; what Airflow stores between them lies in
files under `TASK_NOTES`. Killed, the worker and the triggerer are gone; started again, it is the next try.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    try:  # since 3.2
        from airflow.sdk.exceptions import TaskDeferred
    except ImportError:
        from airflow.exceptions import TaskDeferred  # type: ignore[no-redef]

    from resource_manager.airflow import (
        GPUAllocateOperator,
        GPUReleaseOperator,
        GPUTrainingOperator,
        shared_manager,
        task_results,
    )
    from resource_manager.airflow.decorators.gpu import GPUDecoratedOperator
    from resource_manager.airflow.task_trigger import base, job_watch, member_watch, notes, task_lease

from resource_manager.jobs.launchers import plain_ssh
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.jobs.task_identity import TaskIdentity
from tests.faults.quick import TTL_S, shorten, wait_at

TASK = TaskIdentity("test", "d", "r", "t")
"""The task of every such process; `GPU_MANAGER_INSTANCE` is `test`."""

COMMON: dict[str, Any] = {
    "task_id": TASK.task_id,
    "gpus": 2,
    "ttl": timedelta(seconds=TTL_S),
    "gpu_conn_id": "gpu_manager_default",
}


def shorten_airflow() -> None:
    """Let triggers live ten times as fast."""
    shorten()
    base.MIN_DEFERRAL_S, base.POLL_S = 0.0, 0.1
    base.OUTAGE_POLL_S = shared_manager.RETRY_S = 0.5
    job_watch.LOOK_S = 1.0
    base.is_wanted = task_lease.is_wanted = lambda identity: True  # type: ignore[attr-defined]
    member_watch.READ_S = 0.3
    shared_manager.PAUSE_S, shared_manager.EXPIRE_EVERY_S = 0.1, 0.5
    plain_ssh.CONNECT_TIMEOUT_S = 2.0

    async def set_xcom(key: str, value: Any, **task_instance: Any) -> None:
        push(key, value)

    async def get_xcom(key: str, **task_instance: Any) -> Any:
        return json.loads(_file(key).read_text()) if _file(key).exists() else None

    notes.set_xcom, notes.get_xcom = set_xcom, get_xcom  # type: ignore[attr-defined]
    task_results.CurrentAccess = Variables  # type: ignore[assignment, attr-defined]


class Variables:
    """Airflow Variables in files."""

    def get(self, key: str) -> str | None:
        return _file(key).read_text() if _file(key).exists() else None

    def set(self, key: str, text: str, before: str | None) -> bool:
        _file(key).write_text(text)
        return True

    def delete(self, key: str) -> None:
        _file(key).unlink(missing_ok=True)


def hold_starts() -> None:
    """Hold each start of a job as `gpu-manager run` does under test."""
    gate = os.environ.get("HOLD_START")
    if not gate:
        return
    for launcher in (LocalLauncher, SSHLauncher):
        launcher.start = held_at(Path(gate), launcher.start)  # type: ignore[method-assign]


def held_at(gate: Path, start: Callable[..., bool]) -> Callable[..., bool]:
    def held(*arguments: Any) -> bool:
        wait_at(gate)
        return start(*arguments)

    return held


def _file(key: str) -> Path:
    return Path(os.environ["TASK_NOTES"]) / key


def push(key: str, value: Any) -> None:
    _file(key).write_text(json.dumps(value))


def beat() -> None:
    """Be the user's function, with a child that computes."""
    lease = json.loads(_file("allocation").read_text())
    own = {
        "GPU_LEASE_ID": lease["task_id"],
        "GPU_SERVER": lease["server_name"],
        "GPU_LEASE_FENCING_TOKEN": str(lease["fencing_token"]),
    }
    command = json.loads(os.environ["JOB"])
    subprocess.run(command, env={**os.environ, **own}, check=True)


def operator_of(kind: str) -> Any:
    if kind == "allocate":
        return GPUAllocateOperator(**COMMON)
    if kind == "release":
        return GPUReleaseOperator(task_id="release", lease=json.loads(_file("lease").read_text()))
    if kind == "python":
        return GPUDecoratedOperator(**COMMON, python_callable=beat, op_args=[], op_kwargs={})
    return GPUTrainingOperator(
        **COMMON,
        command=json.loads(os.environ["JOB"]),
        launcher=kind,
        launcher_conn_id="jobs" if kind == "ssh" else None,
        unreachable_timeout=timedelta(seconds=2 * TTL_S),
        stale_grace_s=2.0,
        preempt_grace=2.0,
        retries=5,
    )


def live(operator: Any, try_number: int) -> Any:
    """Go through all steps of one try; return what the task returns."""
    own = {"try_number": try_number, "id": "a", "max_tries": 5, "xcom_push": push, **asdict(TASK)}
    context = {"ti": SimpleNamespace(**own)}
    step: Callable[[], Any] = lambda: operator.execute(context)  # noqa: E731
    while True:
        try:
            return step()
        except TaskDeferred as deferred:
            event = asyncio.run(first_event(deferred.trigger))
            method, more = getattr(operator, deferred.method_name), deferred.kwargs or {}
            step = lambda: method(context, event=event, **more)  # noqa: B023, E731


async def first_event(deferred: Any) -> Any:
    path, arguments = deferred.serialize()
    async for event in type(deferred)(**arguments).run():
        return event.payload
    raise RuntimeError(f"{path} fired no event")


def main() -> None:
    kind, try_number = sys.argv[1], int(sys.argv[2])
    for key in (notes.TASK_NOTES, notes.LOG_PLACE):  # a new try begins without XComs
        _file(key).unlink(missing_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    shorten_airflow()
    hold_starts()
    try:
        returned = live(operator_of(kind), try_number)
    except Exception as error:
        print(f"the try failed: {type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from None
    push("lease", returned)
    print("the task succeeded", flush=True)


if __name__ == "__main__":
    main()
