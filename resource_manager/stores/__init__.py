"""Where the state lives: in memory, in an Airflow Variable or in Redis."""

from __future__ import annotations

from resource_manager.errors import SettingsError
from resource_manager.settings import Settings
from resource_manager.stores.base import Store
from resource_manager.stores.memory import MemoryStore


def open_store(url: str, settings: Settings) -> Store:
    """The store at that URL; raises `SettingsError` for a URL no store knows."""
    if url == "memory://":
        return MemoryStore()
    raise SettingsError(f"unknown store {url!r}: use memory://")


__all__ = ["MemoryStore", "Store", "open_store"]
