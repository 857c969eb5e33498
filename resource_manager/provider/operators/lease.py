"""A lease around any other operators: `GPUAllocateOperator`, `GPUReleaseOperator` and `gpu_lease`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseOperator, TaskGroup
from airflow.sdk.exceptions import AirflowFailException

from resource_manager.launchers.devices import device_environment
from resource_manager.provider.demand import end_lease
from resource_manager.provider.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.provider.operators.base import GPUOperator
from resource_manager.provider.triggers import identity_of
from resource_manager.reconcile import RUN_SCOPE


class GPUAllocateOperator(GPUOperator):
    """Waits in the triggerer for GPUs and returns the allocation; the lease outlives this task.

    It ends with `GPUReleaseOperator`, and at the latest when the reconciler sees that the DAG run is over.
    Parameters as for `GPUOperator`.
    """

    ui_color = "#d0e0f0"

    def __init__(self, *, ttl: timedelta = timedelta(days=1), **kwargs: Any) -> None:
        super().__init__(ttl=ttl, **kwargs)

    def execute(self, context: Any) -> dict[str, Any]:
        """The allocation, at once or after a wait."""
        allocation = self.lease(context, self.manager, labels={"scope": RUN_SCOPE})
        self.log.info("holding GPUs %s of %s", allocation["gpu_devices"], allocation["server_name"])
        return allocation


class GPUReleaseOperator(BaseOperator):
    """Ends a lease of `GPUAllocateOperator`; made for a teardown, so a lease that is over is no failure.

    :param lease: the allocation, as `GPUAllocateOperator` returned it: `allocate.output`.
    """

    template_fields: Sequence[str] = ("lease",)
    ui_color = "#d0e0f0"

    def __init__(self, *, lease: Any, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lease = lease
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any) -> None:
        if not self.lease:
            self.log.info("nothing was allocated")
            return
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        entry = manager.status_of(self.lease["task_id"])
        if entry is None or entry.get("fencing_token") != self.lease["fencing_token"]:
            self.log.info("the lease was over before")
            return
        identity, _ = identity_of(context)
        instance = entry["labels"].get("instance", identity.instance)
        if instance != identity.instance:
            raise AirflowFailException(
                f"the lease {entry['task_id']!r} belongs to the Airflow {instance!r}, this is "
                f"{identity.instance!r}: release it there"
            )
        end_lease(manager, self.lease["task_id"], "SUCCESS")


@dataclass(frozen=True, slots=True)
class GPULease:
    """What `gpu_lease` gives to the tasks inside: texts for their templated fields."""

    allocate: GPUAllocateOperator

    @property
    def output(self) -> Any:
        """The allocation, as an argument of a task."""
        return self.allocate.output

    def value(self, key: str) -> str:
        """A template of that key of the allocation: `lease.value("server_name")`."""
        return f"{{{{ {self._pull()}['{key}'] }}}}"

    def environment(self, vendor: str = "nvidia") -> dict[str, str]:
        """Environment for a task on the server itself, outside a container; no memory limit for a share."""
        devices = self.value("gpu_devices")
        fixed = device_environment(vendor, (), gpu_milli=self.allocate.gpu_milli)
        environment = {
            name: devices if name.endswith("VISIBLE_DEVICES") else value for name, value in fixed.items()
        }
        return {**environment, "GPU_SERVER": self.value("server_name")}

    def docker_command(self, image: str, command: str = "") -> str:
        """A template of the `docker run` that `build_docker_cmd` makes, for an SSH or Bash operator."""
        return (
            f"{{{{ macros.gpu_resource_manager.build_docker_cmd({self._pull()}, {image!r}, {command!r}) }}}}"
        )

    def _pull(self) -> str:
        """The allocation, in a template; in a mapped task group that of its own index, not all of them."""
        mapped = next(self.allocate.iter_mapped_task_groups(), None) is not None
        index = ", map_indexes=ti.map_index" if mapped else ""
        return f"ti.xcom_pull(task_ids='{self.allocate.task_id}'{index})"


@contextmanager
def gpu_lease(
    gpus: int | str, cpus: int | str = 1, *, group_id: str = "gpu_lease", **arguments: Any
) -> Iterator[GPULease]:
    """A task group whose tasks share one lease: granted before the first, released after the last.

    `arguments` are those of `GPUAllocateOperator`. The release is a teardown: it runs however they end.
    """
    gpu_conn_id = arguments.pop("gpu_conn_id", DEFAULT_CONNECTION)
    with TaskGroup(group_id):
        allocate = GPUAllocateOperator(
            task_id="allocate", gpus=gpus, cpus=cpus, gpu_conn_id=gpu_conn_id, **arguments
        )
        release = GPUReleaseOperator(task_id="release", lease=allocate.output, gpu_conn_id=gpu_conn_id)
        with release.as_teardown(setups=allocate):
            yield GPULease(allocate)
