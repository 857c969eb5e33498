"""Names for authors of DAGs; each is imported at its first use."""

from typing import TYPE_CHECKING

from resource_manager.lazy import lazy_names

if TYPE_CHECKING:
    from resource_manager.provider.operators import (
        GPUAllocateOperator,
        GPUReleaseOperator,
        GPUTrainingOperator,
        gpu_lease,
        reconcile_dag,
    )
    from resource_manager.provider.sensors import GPUAvailableSensor
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "GPUAllocateOperator": "resource_manager.provider.operators.lease",
            "GPUAvailableSensor": "resource_manager.provider.sensors",
            "GPUReleaseOperator": "resource_manager.provider.operators.lease",
            "GPUTrainingOperator": "resource_manager.provider.operators.training",
            "gpu_lease": "resource_manager.provider.operators.lease",
            "reconcile_dag": "resource_manager.provider.operators.reconcile",
        },
    )

__all__ = [
    "GPUAllocateOperator",
    "GPUAvailableSensor",
    "GPUReleaseOperator",
    "GPUTrainingOperator",
    "gpu_lease",
    "reconcile_dag",
]
