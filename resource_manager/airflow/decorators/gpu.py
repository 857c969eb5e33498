"""`@task.gpu`: a Python function that runs in a worker with its GPUs in the environment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory

from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.triggers import LeaseEndTrigger, identity_of
from resource_manager.airflow.use_meter import warn_when_idle
from resource_manager.airflow.version_compat import AirflowException, AirflowFailException
from resource_manager.core.changes import Outcome
from resource_manager.errors import LeaseNotFoundError, LockTimeoutError, ResourceManagerError
from resource_manager.jobs.launchers.devices import device_environment, lease_environment
from resource_manager.jobs.reconcile import PROCESS_SCOPE
from resource_manager.jobs.registered_process import register_process
from resource_manager.manager.cluster_file.durations import seconds_of
from resource_manager.manager.demand import given_value
from resource_manager.manager.results import Allocation
from resource_manager.manager.service import LeaseService

SERVER_VARIABLE = "GPU_MANAGER_SERVER"


class GPUDecoratedOperator(GPUOperator, DecoratedOperator, PythonOperator):
    """Wait for the GPUs in the triggerer, then run the function in a worker and release them.

    The lease lives `ttl` beyond its last renewal. A process that cannot renew ends itself before then, so
    an expired lease has no process left, wherever the worker ran. A retry that finds the lease of an
    earlier try waits until that lease has ended.

    The function runs on its worker's machine. If workers run on the GPU servers themselves, give each
    worker the environment variable `GPU_MANAGER_SERVER` with its server's name, and give each server an
    Airflow queue: the task then requests GPUs of that server only.

    Parameters as for `GPUOperator`; `preemptible` is False if None.
    """

    custom_operator_name = "@task.gpu"
    quarantined_by_default = False
    preemptible_by_default = False  # a Python function cannot go on where it stopped
    default_ttl = timedelta(minutes=1)
    template_fields: Sequence[str] = (*PythonOperator.template_fields, *GPUOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {"op_args": "py", "op_kwargs": "py"}

    def __init__(
        self,
        *,
        ttl: float | str | timedelta = default_ttl,
        python_callable: Callable[..., Any],
        op_args: Any = None,
        op_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        call = {"python_callable": python_callable, "op_args": op_args, "op_kwargs": op_kwargs}
        super().__init__(ttl=ttl, kwargs_to_upstream=call, **call, **kwargs)
        if isinstance(self.nodes, int):  # a template is known only once it is rendered
            self._require_one_server()

    def execute(self, context: Any) -> Any:
        """Request the lease; run the function if it is granted and no other try may still use it."""
        try:
            self._require_one_server()
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        return self.execute_request(context, {})

    def execute_request(self, context: Any, event: dict[str, Any], granted_to_this_try: bool = False) -> Any:
        """Take the first steps; after an outage of at most `max_wait` repeat them, but never the function."""
        step, again = "execute_request", {"granted_to_this_try": granted_to_this_try}
        with outlasting_outages(self, step, event, at_most=self.max_wait, **again):
            manager = self.manager
            allocation = self._granted(context, manager, granted_to_this_try)
        return self._run(context, manager, allocation)

    def _granted(self, context: Any, manager: LeaseService, granted_to_this_try: bool) -> Allocation:
        """Return this try's allocation, on this worker's server; defer for as long as there is none."""
        identity, plain_identity = identity_of(context)
        this_try = str(context["ti"].try_number)
        status = self.lease(
            context,
            manager,
            labels={"try_number": this_try, "scope": PROCESS_SCOPE},
            **self._server_of_worker(manager),
        )
        if not granted_to_this_try and status["labels"].get("try_number") != this_try:
            self.log.info("an earlier try may still use the GPUs; waiting until its lease has ended")
            self.defer(
                trigger=LeaseEndTrigger(plain_identity, status["fencing_token"], self.gpu_conn_id),
                method_name="execute_over",
            )
        here = os.environ.get(SERVER_VARIABLE, status["server_name"])
        if here != status["server_name"]:
            with suppress(LockTimeoutError):  # it will expire
                manager.release(
                    identity.lease_id, fencing_token=status["fencing_token"], outcome=Outcome.FAILED
                )
            raise AirflowException(
                f"the GPUs were granted on {status['server_name']}, but this worker is on {here} "
                f"({SERVER_VARIABLE}): give the task the Airflow queue of one server's workers"
            )
        if self.gives_back(manager, status):
            return self._granted(context, manager, granted_to_this_try=True)
        self.log.info("allocated GPUs %s of %s", status["gpu_devices"], status["server_name"])
        return status

    def _require_one_server(self) -> None:
        """Raise `ValueError` for a gang: the function is one process, of one worker."""
        nodes = given_value(self.nodes)
        if nodes not in (None, 1, "1"):
            raise ValueError(
                f"nodes={nodes}: @task.gpu runs one function in one worker; a job on several servers is "
                "GPUTrainingOperator(nodes=…), or tasks in gpu_lease(nodes=…)"
            )

    def _server_of_worker(self, manager: LeaseService) -> dict[str, str]:
        """Return the server named by `GPU_MANAGER_SERVER` as a field, or none if it is not set.

        Raises `AirflowFailException` if the task requires another server.
        """
        here, wanted = os.environ.get(SERVER_VARIABLE), given_value(self.server)
        if here is None:
            return {}
        if wanted is None or str(wanted) == here:
            return {"server": here}
        for row in manager.servers():
            if row["server_name"] == here and str(row["server_id"]) == str(wanted):
                return {"server": here}
        raise AirflowFailException(
            f"the task requires server {wanted!r}, but this worker is on {here!r} ({SERVER_VARIABLE}): give "
            "the task the Airflow queue of that server's workers"
        )

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Continue after the wait; this try queued the request, so no other try ran under its lease."""
        with outlasting_outages(self, "execute_granted", event):
            self.fail_if_overdue(context, event)
        return self.execute_request(context, {}, granted_to_this_try=True)

    def execute_over(self, context: Any, event: dict[str, Any]) -> Any:
        """Continue after the lease of an earlier try ended."""
        return self.execute_request(context, {})

    def _run(self, context: Any, manager: LeaseService, allocation: Allocation) -> Any:
        context["ti"].xcom_push(key="allocation", value=allocation)
        gpus = allocation["gpu_ids"], allocation["gpu_uuids"]
        devices = device_environment(
            allocation["vendor"],
            *gpus,
            gpu_milli=allocation["gpu_milli"],
            gpu_memory_mib=allocation["gpu_memory_mib"],
        )
        token, outcome = allocation["fencing_token"], Outcome.FAILED
        devices |= lease_environment(*gpus) | {"GPU_LEASE_ID": allocation["task_id"]}
        register_process(allocation["task_id"], token)
        task_over = warn_when_idle(manager, allocation, self.log)
        before = {name: os.environ.get(name) for name in devices}
        os.environ.update(devices)
        try:
            with _kept(manager, allocation["task_id"], token, seconds_of(self._ttl)):
                result = super().execute(context)
            outcome = Outcome.SUCCESS
            return result
        finally:
            task_over.set()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            try:
                manager.release(allocation["task_id"], fencing_token=token, outcome=outcome)
            except ResourceManagerError as error:  # a failed release must not hide the function's own result
                self.log.warning("the lease was not released and will expire: %s", error)


@contextmanager
def _kept(manager: LeaseService, lease_id: str, token: int, ttl_s: float) -> Iterator[None]:
    """Renew the lease while the block runs; kill this process and its children before it expires."""
    over = threading.Event()
    renewed_at = time.monotonic()
    problem = "no answer"
    manager.renew(lease_id, fencing_token=token)

    def keep() -> None:
        nonlocal renewed_at, problem
        while not over.wait(ttl_s / 4):
            asked_at = time.monotonic()
            try:
                failure = manager.renew(lease_id, fencing_token=token)["gpu_failed"]
                renewed_at = asked_at
                if failure and not over.is_set():
                    _end_this_process(f"one of its GPUs failed: {failure}")
                    return
            except LeaseNotFoundError:
                if not over.is_set():  # otherwise this process itself released the lease meanwhile
                    _end_this_process("the lease was ended by another client")
                    return
            except Exception as error:  # any failure to renew lets the lease expire
                problem = str(error)

    # A separate thread, since a renewal may wait for its answer until after the lease has expired.
    def end_in_time() -> None:
        while not over.wait(max(renewed_at + 0.75 * ttl_s - time.monotonic(), 0.0)):
            if time.monotonic() - renewed_at >= 0.75 * ttl_s:
                _end_this_process(f"the lease could not be renewed: {problem}")
                return

    guard = threading.Thread(target=end_in_time, name="gpu-lease-end", daemon=True)
    guard.start()
    threading.Thread(target=keep, name="gpu-lease", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        guard.join()  # the guard must not kill the process after the block has ended


def _end_this_process(reason: str) -> None:
    import psutil

    print(f"ending this task: {reason}", flush=True)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended by itself
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def gpu_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> Any:
    """Decorate a function as `@task.gpu(gpus=2)`; see `GPUDecoratedOperator` for the parameters."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=GPUDecoratedOperator,
        **kwargs,
    )
