"""GPU leases for Apache Airflow tasks: allocator, stores and manager."""

from resource_manager.aio import AsyncGPUResourceManager
from resource_manager.errors import ResourceManagerError
from resource_manager.manager import GPUResourceManager
from resource_manager.models import Lease, Request
from resource_manager.settings import Settings
from resource_manager.stores import MemoryStore, RedisStore, VariableStore

__version__ = "0.1.0"

__all__ = [
    "AsyncGPUResourceManager",
    "GPUResourceManager",
    "Lease",
    "MemoryStore",
    "RedisStore",
    "Request",
    "ResourceManagerError",
    "Settings",
    "VariableStore",
]
