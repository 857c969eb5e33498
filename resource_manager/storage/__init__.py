"""Stores of the state: in memory, in an Airflow Variable, in Redis or in a database."""

from __future__ import annotations

from resource_manager.errors import SettingsError, redact
from resource_manager.settings import Settings
from resource_manager.storage.airflow_variable import DEFAULT_LOCK, DEFAULT_VARIABLE
from resource_manager.storage.base import Store
from resource_manager.storage.memory import MemoryStore
from resource_manager.storage.redis import SCHEMES

SQL_SCHEMES = ("postgresql", "mysql", "sqlite")


def open_store(
    url: str, settings: Settings | None = None, *, variable: str = DEFAULT_VARIABLE, lock: str = DEFAULT_LOCK
) -> Store:
    """Return the store of that URL; it connects when it is first used. Raises `SettingsError`.

    memory:// · airflow:// (or airflow://<name of the Variable>) · redis://host:6379/0 · rediss://… ·
    unix:///path/to/socket · redis+sentinel://host:26379,host:26379/service/0 ·
    postgresql://user@host/database · mysql://user@host/database · sqlite:////path/to/file.
    All but the first two take `?namespace=`. `variable` is the Variable of `airflow://`, `lock` its lock in
    Redis.
    """
    settings = Settings() if settings is None else settings
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore()
    if scheme == "airflow":
        if not settings.redis_url:
            raise SettingsError(
                "an airflow:// store needs a Redis server for lock and clock: set GPU_MANAGER_REDIS_URL"
            )
        from resource_manager.storage.airflow_variable.access import variable_access
        from resource_manager.storage.airflow_variable.store import VariableStore
        from resource_manager.storage.redis.client import RedisClient

        client, variable = RedisClient.from_url(settings.redis_url), url.partition("://")[2] or variable
        return VariableStore(variable_access(), client, variable=variable, lock=lock)
    if scheme in SCHEMES:
        from resource_manager.storage.redis.client import RedisClient
        from resource_manager.storage.redis.store import RedisStore

        client = RedisClient.from_url(url)
        return RedisStore(
            client, history_length=settings.history_length, history_bytes=settings.history_bytes
        )
    if scheme in SQL_SCHEMES:
        from resource_manager.storage.sql.database import Database  # the driver is an extra
        from resource_manager.storage.sql.store import SqlStore

        return SqlStore(Database(url), history_length=settings.history_length)
    known = ", ".join(f"{name}://" for name in ("memory", "airflow", *SCHEMES, *SQL_SCHEMES))
    raise SettingsError(f"unknown kind of store {redact(url)!r}; its URL must begin with one of {known}")


__all__ = ["MemoryStore", "Store", "open_store"]
