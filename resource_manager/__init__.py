"""GPU leases for Apache Airflow tasks: allocator, stores and manager."""

from typing import TYPE_CHECKING

from resource_manager.lazy import lazy_names

if TYPE_CHECKING:
    from resource_manager.aio import AsyncGPUResourceManager
    from resource_manager.errors import ResourceManagerError
    from resource_manager.manager import GPUResourceManager
    from resource_manager.models import Lease, Request
    from resource_manager.refusal import Refusal
    from resource_manager.settings import Settings
    from resource_manager.stores import MemoryStore, RedisStore, VariableStore
else:  # a command that calls a service, or prints its help, needs none of them
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncGPUResourceManager": "resource_manager.aio",
            "GPUResourceManager": "resource_manager.manager",
            "Lease": "resource_manager.models",
            "MemoryStore": "resource_manager.stores",
            "Refusal": "resource_manager.refusal",
            "RedisStore": "resource_manager.stores",
            "Request": "resource_manager.models",
            "ResourceManagerError": "resource_manager.errors",
            "Settings": "resource_manager.settings",
            "VariableStore": "resource_manager.stores",
        },
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncGPUResourceManager",
    "GPUResourceManager",
    "Lease",
    "MemoryStore",
    "RedisStore",
    "Refusal",
    "Request",
    "ResourceManagerError",
    "Settings",
    "VariableStore",
]
