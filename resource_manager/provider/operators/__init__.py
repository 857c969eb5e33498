"""The operators."""

from resource_manager.provider.operators.training import GPUTrainingOperator

__all__ = ["GPUTrainingOperator"]
