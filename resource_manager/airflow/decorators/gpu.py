"""`@task.gpu`: a Python function that runs in a worker with its GPUs in the environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory

from resource_manager.airflow.in_worker import RunsInWorker
from resource_manager.airflow.operators.base import GPUOperator
from resource_manager.airflow.resuming import Resumes
from resource_manager.airflow.task_demand import ATTRIBUTES, check_partial


class GPUDecoratedOperator(RunsInWorker, GPUOperator, DecoratedOperator, PythonOperator):
    """Wait for the GPUs in the triggerer, then run the function in a worker and release them.

    The lease lives `ttl` beyond its last renewal. A process that cannot renew ends itself before then, so
    an expired lease has no process left, wherever the worker ran. A retry that finds the lease of an
    earlier try waits until that lease has ended.

    The function runs on its worker's machine. If workers run on the GPU servers themselves, give each
    worker the environment variable `GPU_MANAGER_SERVER` with its server's name, and give each server an
    Airflow queue: the task then requests GPUs of that server only.

    Parameters as for `GPUOperator`; `ttl` is a minute and `preemptible` False if None. `quarantine` has no
    effect: the process has ended before its lease expires.
    """

    custom_operator_name = "@task.gpu"
    name_in_errors = "@task.gpu runs one function"
    template_fields: Sequence[str] = (*PythonOperator.template_fields, *GPUOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {"op_args": "py", "op_kwargs": "py"}

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Any = None,
        op_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        call = {"python_callable": python_callable, "op_args": op_args, "op_kwargs": op_kwargs}
        super().__init__(kwargs_to_upstream=call, **call, **kwargs)
        if isinstance(self.nodes, int):  # a template is known only once it is rendered
            self.require_one_server(self.nodes)

    def work(self, context: Any) -> Any:
        """Return what the function returns."""
        return super(Resumes, self).execute(context)


def gpu_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> Any:
    """Decorate a function as `@task.gpu(gpus=2)`; see `GPUDecoratedOperator` for the parameters."""
    if "resources" in kwargs:  # which Airflow takes for its own parameter where the function is mapped
        kwargs[ATTRIBUTES["resources"]] = kwargs.pop("resources")
    check_partial(kwargs)  # before the function is mapped, which makes no operator
    if isinstance(kwargs.get("nodes"), int):
        GPUDecoratedOperator.require_one_server(kwargs["nodes"])
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=GPUDecoratedOperator,
        **kwargs,
    )
