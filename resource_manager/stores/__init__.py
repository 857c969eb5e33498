"""Where the state lives: in memory, in an Airflow Variable or in Redis."""

from __future__ import annotations

from resource_manager.stores.base import Store
from resource_manager.stores.memory import MemoryStore

__all__ = ["MemoryStore", "Store"]
