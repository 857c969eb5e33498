"""Airflow operators that request, use, release and reconcile leases."""

from resource_manager.airflow.operators.lease import (
    GPUAllocateOperator,
    GPULease,
    GPUReleaseOperator,
    gpu_lease,
)
from resource_manager.airflow.operators.reconcile import GPUReconcileOperator, reconcile_dag
from resource_manager.airflow.operators.training import GPUTrainingOperator

__all__ = [
    "GPUAllocateOperator",
    "GPULease",
    "GPUReconcileOperator",
    "GPUReleaseOperator",
    "GPUTrainingOperator",
    "gpu_lease",
    "reconcile_dag",
]
