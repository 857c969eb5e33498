"""`@task.gpu`: a Python function in a worker, with its GPUs in the environment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory
from airflow.sdk.exceptions import AirflowException

from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.launchers.devices import device_environment
from resource_manager.models import MILLI_PER_GPU
from resource_manager.provider.demand import Demand, describe_waiting, end_lease, team_of
from resource_manager.provider.hook import DEFAULT_CONNECTION, GPUManagerHook, Manager
from resource_manager.provider.links import ConsoleLink
from resource_manager.provider.triggers import GrantTrigger, LeaseEndTrigger, identity_of

SERVER_VARIABLE = "GPU_MANAGER_SERVER"


class GPUDecoratedOperator(DecoratedOperator, PythonOperator):
    """Waits for its GPUs in the triggerer, then runs the function in a worker and releases them.

    The lease lives `ttl` beyond its last renewal, and the process ends itself before that if it cannot
    renew. So a lease that ran out has no process any more, wherever the worker was. A new try that finds a
    lease of a try before waits until that is over.

    The function runs where its worker is. Where workers run on the GPU servers themselves, give each the
    environment variable `GPU_MANAGER_SERVER` with its server's name and Airflow queues of their own: then
    only GPUs of that server are asked for.

    Parameters as for `GPUTrainingOperator`.
    """

    custom_operator_name = "@task.gpu"
    template_fields: Sequence[str] = (*PythonOperator.template_fields, "gpus", "cpus", "server", "gpu_type")
    template_fields_renderers: ClassVar[dict[str, str]] = {"op_args": "py", "op_kwargs": "py"}
    operator_extra_links = (ConsoleLink(),)

    def __init__(
        self,
        *,
        gpus: int | str,
        cpus: int | str = 1,
        server: int | str | None = None,
        gpu_type: str | Sequence[str] = (),
        gpu_milli: int = MILLI_PER_GPU,
        priority: int | None = None,
        team: str | None = None,
        max_wait: timedelta | None = None,
        expected_runtime: timedelta | None = None,
        ttl: timedelta = timedelta(minutes=1),
        gpu_conn_id: str = DEFAULT_CONNECTION,
        python_callable: Callable[..., Any],
        op_args: Any = None,
        op_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        call = {"python_callable": python_callable, "op_args": op_args, "op_kwargs": op_kwargs}
        super().__init__(kwargs_to_upstream=call, **call, **kwargs)
        self.gpus = gpus
        self.cpus = cpus
        self.server = server
        self.gpu_type = gpu_type
        self.gpu_milli = gpu_milli
        self.priority = priority
        self.team = team
        self.max_wait = max_wait
        self.expected_runtime = expected_runtime
        self.ttl = ttl
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any, granted_to_this_try: bool = False) -> Any:
        """Asks for the lease, and runs the function if it is granted and no other try may still use it."""
        identity, plain_identity = identity_of(context)
        this_try = str(context["ti"].try_number)
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        demand = Demand(
            self.gpus,
            self.cpus,
            self.server,
            self.gpu_type,
            self.gpu_milli,
            self.priority_weight if self.priority is None else self.priority,
            team_of(self, self.team),
            self.owner,
            self.ttl,
            self.expected_runtime,
            quarantine=False,
            labels={"try_number": this_try},
            required_server=os.environ.get(SERVER_VARIABLE),
        )
        status = demand.submit(manager, identity)
        if status["state"] == "WAITING":
            self.log.info("%s", describe_waiting(status))
            max_wait_s = None if self.max_wait is None else self.max_wait.total_seconds()
            self.defer(
                trigger=GrantTrigger(plain_identity, self.gpu_conn_id, max_wait_s),
                method_name="execute_granted",
            )
        if not granted_to_this_try and status["labels"].get("try_number") != this_try:
            self.log.info("a try before this one may still use the GPUs; waiting until its lease is over")
            self.defer(
                trigger=LeaseEndTrigger(plain_identity, status["fencing_token"], self.gpu_conn_id),
                method_name="execute_over",
            )
        here = os.environ.get(SERVER_VARIABLE, status["server_name"])
        if here != status["server_name"]:
            end_lease(manager, identity.lease_id, "FAILED")
            raise AirflowException(
                f"granted on {status['server_name']}, but this worker is on {here}: "
                "give the task the queue of one server's workers"
            )
        self.log.info("holding GPUs %s of %s", status["gpu_devices"], status["server_name"])
        return self._run(context, manager, status)

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Goes on after the wait: this try saw the request wait, so nobody else ran under its lease."""
        if event["state"] == "TOO LATE":
            identity, _ = identity_of(context)
            if GPUManagerHook(self.gpu_conn_id).get_conn().cancel(identity.lease_id):
                raise AirflowException(f"no GPUs within max_wait = {self.max_wait}")
        return self.execute(context, granted_to_this_try=True)

    def execute_over(self, context: Any, event: dict[str, Any]) -> Any:
        """Goes on after the lease of another try ended."""
        return self.execute(context)

    def _run(self, context: Any, manager: Manager, allocation: dict[str, Any]) -> Any:
        context["ti"].xcom_push(key="allocation", value=allocation)
        devices = device_environment(
            allocation["vendor"], allocation["gpu_ids"], gpu_milli=allocation["gpu_milli"]
        )
        token, outcome = allocation["fencing_token"], "FAILED"
        before = {name: os.environ.get(name) for name in devices}
        os.environ.update(devices)
        try:
            with _kept(manager, allocation["task_id"], token, self.ttl.total_seconds()):
                result = super().execute(context)
            outcome = "SUCCESS"
            return result
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            manager.release_resources(allocation["task_id"], fencing_token=token, outcome=outcome)


@contextmanager
def _kept(manager: Manager, task_id: str, token: int, ttl_s: float) -> Iterator[None]:
    """Renews the lease while the block runs; ends this process and its children before it runs out."""
    over = threading.Event()
    renewed_at = time.monotonic()
    manager.renew(task_id, fencing_token=token)

    def keep() -> None:
        nonlocal renewed_at
        while not over.wait(ttl_s / 4):
            asked_at = time.monotonic()
            try:
                manager.renew(task_id, fencing_token=token)
                renewed_at = asked_at
            except LeaseNotFoundError:
                _end_this_process("the lease was ended by someone else")
            except ResourceManagerError as error:
                if time.monotonic() - renewed_at > ttl_s / 2:
                    _end_this_process(f"the lease could not be renewed: {error}")

    thread = threading.Thread(target=keep, name="gpu-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _end_this_process(reason: str) -> None:
    import psutil

    print(f"ending this task: {reason}", flush=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def gpu_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> Any:
    """`@task.gpu(gpus=2)`: see `GPUDecoratedOperator`."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=GPUDecoratedOperator,
        **kwargs,
    )
