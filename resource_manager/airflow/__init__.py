"""Names for authors of DAGs; each is imported at its first use."""

from typing import TYPE_CHECKING

from resource_manager.lazy import lazy_names

if TYPE_CHECKING:
    from resource_manager.airflow.leased_operators.with_gpus import with_gpus
    from resource_manager.airflow.operators.lease import GPUAllocateOperator, GPUReleaseOperator, gpu_lease
    from resource_manager.airflow.operators.reconcile import reconcile_dag
    from resource_manager.airflow.operators.training import GPUTrainingOperator
    from resource_manager.airflow.sensors import GPUAvailableSensor
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "GPUAllocateOperator": "resource_manager.airflow.operators.lease",
            "GPUAvailableSensor": "resource_manager.airflow.sensors",
            "GPUReleaseOperator": "resource_manager.airflow.operators.lease",
            "GPUTrainingOperator": "resource_manager.airflow.operators.training",
            "gpu_lease": "resource_manager.airflow.operators.lease",
            "reconcile_dag": "resource_manager.airflow.operators.reconcile",
            "with_gpus": "resource_manager.airflow.leased_operators.with_gpus",
        },
    )

__all__ = [
    "GPUAllocateOperator",
    "GPUAvailableSensor",
    "GPUReleaseOperator",
    "GPUTrainingOperator",
    "gpu_lease",
    "reconcile_dag",
    "with_gpus",
]
