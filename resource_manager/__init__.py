"""GPU leases for Apache Airflow tasks: allocator, stores and manager."""

from typing import TYPE_CHECKING

from resource_manager.lazy import lazy_names

if TYPE_CHECKING:
    from resource_manager.core.models import Lease, Request
    from resource_manager.errors import ResourceManagerError
    from resource_manager.manager.aio import AsyncGPUResourceManager
    from resource_manager.manager.demand import Demand
    from resource_manager.manager.manager import GPUResourceManager
    from resource_manager.manager.refusal_wording import Refusal
    from resource_manager.settings import Settings
    from resource_manager.storage import MemoryStore
    from resource_manager.storage.airflow_variable.store import VariableStore
    from resource_manager.storage.redis.store import RedisStore
else:  # a command that calls a service, or prints its help, needs none of them
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncGPUResourceManager": "resource_manager.manager.aio",
            "Demand": "resource_manager.manager.demand",
            "GPUResourceManager": "resource_manager.manager.manager",
            "Lease": "resource_manager.core.models",
            "MemoryStore": "resource_manager.storage",
            "Refusal": "resource_manager.manager.refusal_wording",
            "RedisStore": "resource_manager.storage.redis.store",
            "Request": "resource_manager.core.models",
            "ResourceManagerError": "resource_manager.errors",
            "Settings": "resource_manager.settings",
            "VariableStore": "resource_manager.storage.airflow_variable.store",
        },
    )

__version__ = "0.1.0"

STORED_FORMAT = 1
"""Number of the format of what stores keep; a reader refuses a newer one."""

__all__ = [
    "AsyncGPUResourceManager",
    "Demand",
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
