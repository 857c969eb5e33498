"""What a store lacks to keep a state safely, in one line each: the checks of every kind of store."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import closing

from resource_manager.errors import SettingsError, StoreError, redact
from resource_manager.settings import Settings
from resource_manager.storage import SQL_SCHEMES, open_store
from resource_manager.storage.finding import Finding
from resource_manager.storage.jobs import A_KEY
from resource_manager.storage.redis import SCHEMES
from resource_manager.storage.redis.check import CHECKS, CHECKS_OF_LOCK
from resource_manager.storage.redis.client import RedisClient

logger = logging.getLogger(__name__)


def check(settings: Settings) -> list[Finding]:
    """Return what all checks of the store find; raises `StoreError` if it cannot be reached."""
    scheme = settings.store.partition("://")[0]
    if scheme == "memory":
        return [Finding(True, "the state is in the memory of one process, and ends with it")]
    if scheme == "airflow":
        return _of_redis(settings.redis_url or "", holds_state=False)
    return _of_redis(settings.store, holds_state=True) if scheme in SCHEMES else _of_database(settings.store)


def warn(settings: Settings) -> None:
    """Log a warning for each fault of the store; nothing where it cannot be reached."""
    try:
        found = check(settings)
    except StoreError:
        return
    for finding in (*found, *of_job_keys(settings)):
        if not finding.ok:
            logger.warning("%s: %s", redact(settings.store), finding.text)


def of_job_keys(settings: Settings) -> list[Finding]:
    """Return whether stored jobs are encrypted; Airflow encrypts its Variables itself."""
    if settings.store.startswith(("airflow://", "memory://")):
        return []
    if settings.job_keys:
        return [Finding(True, "stored jobs are encrypted")]
    text = (
        "jobs that are stored with a request are not encrypted: who may read the store reads their "
        f"environment; set GPU_MANAGER_JOB_KEYS in all processes to the key that this prints once: {A_KEY} "
        "(see docs/stores.md)"
    )
    return [Finding(False, text, is_caution=True)]


def of_state(settings: Settings, findings: Iterable[Finding]) -> list[Finding]:
    """Return whether the stored state, if any, can be reached, as a Variable beside its lock, and read.

    A database of which something was found to be missing is not read: that would create its tables.
    """
    if settings.store.partition("://")[0] in SQL_SCHEMES and not all(finding.ok for finding in findings):
        return []
    try:
        with closing(open_store(settings.store, settings)) as store:
            state = store.refresh(None)
            closed = Finding(False, f"the state is closed: {store.closed}")
    except (StoreError, SettingsError) as error:  # also that an airflow:// store needs Airflow
        return [Finding(False, str(error))]
    if store.closed:
        return [] if closed in findings else [closed]  # a Variable alone tells that only as it is read
    return [] if state is None else [Finding(True, f"the state can be read (version {state.version})")]


def _of_redis(url: str, *, holds_state: bool) -> list[Finding]:
    with closing(RedisClient.from_url(url)) as client:
        checks = CHECKS if holds_state else CHECKS_OF_LOCK
        return [finding for each in checks for finding in each(client)]


def _of_database(url: str) -> list[Finding]:
    from resource_manager.storage.sql.check import CHECKS as OF_DATABASE
    from resource_manager.storage.sql.database import Database  # the driver is an extra

    with closing(Database(url)) as database:
        return list(dict.fromkeys(finding for each in OF_DATABASE for finding in each(database)))
