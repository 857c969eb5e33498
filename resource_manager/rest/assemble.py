"""Assembly of a service from a manager, and the storage of its tokens, sessions and secret."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from resource_manager.agent.generation import state_folder
from resource_manager.fleet.opening import REPORTS
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest import redis_persistence
from resource_manager.rest.auth import Authenticator, OpenAuthenticator, TokenAuthenticator
from resource_manager.rest.connection import Clock
from resource_manager.rest.console.use_page import AccountsCache
from resource_manager.rest.held_requests import HeldRequests
from resource_manager.rest.limits import DEFAULT_RATE, DEFAULT_THREADS, Limits
from resource_manager.rest.observability.gpu_metrics import GpuGauges
from resource_manager.rest.observability.metrics import Metrics
from resource_manager.rest.private_file import PrivateFile, config_folder
from resource_manager.rest.service import Service
from resource_manager.rest.sessions import MemorySessions, SessionFile, SessionStore
from resource_manager.rest.sign_on.log_in import SignOnDesk
from resource_manager.rest.state_follower import StateFollower
from resource_manager.rest.tokens import TokenFile, TokenStore
from resource_manager.settings import Settings
from resource_manager.storage import SQL_SCHEMES, checks
from resource_manager.storage.redis import SCHEMES
from resource_manager.storage.redis.client import RedisClient

SIGN_ON_AGE_S = 2.0
"""Age up to which the provider's settings are taken as they were: strangers ask for the log-in page."""


@dataclass(frozen=True, slots=True)
class Persistence:
    """Storage of all that is not cluster state: tokens, sessions, the secret that signs.

    `keep_secret` stores the secret again if the store has lost it: else the next service makes another one.
    """

    tokens: TokenStore
    sessions: SessionStore
    secret: str = field(repr=False)
    keep_secret: Callable[[], object] = lambda: None


def persistence_of(settings: Settings, tokens_file: Path | None = None) -> Persistence:
    """Open the storage in the store's Redis or database, shared by every service of the store, else in files.

    `tokens_file` takes precedence over both.
    """
    if tokens_file is None and settings.store.partition("://")[0] in SQL_SCHEMES:
        return _in_database(settings.store)
    client = _redis_of(settings) if tokens_file is None else None
    if client is not None:
        secret = redis_persistence.secret(client)
        return Persistence(
            redis_persistence.RedisTokens(client),
            redis_persistence.RedisSessions(client),
            secret,
            partial(redis_persistence.secret, client, secret),
        )
    path = tokens_file or config_folder() / "tokens.json"
    secret, sessions = _secret_and_sessions(path.parent)
    return Persistence(TokenFile(path), sessions, secret)


def shared_tokens(settings: Settings) -> TokenStore | None:
    """Return the tokens in the store's Redis or database, or that of its lock; None if they are in a file."""
    is_sql = settings.store.partition("://")[0] in SQL_SCHEMES
    return persistence_of(settings).tokens if is_sql or _redis_of(settings) is not None else None


def _in_database(url: str) -> Persistence:
    from resource_manager.rest import sql_persistence  # the driver is an extra
    from resource_manager.storage.sql.database import Database

    database = Database(url)
    secret = sql_persistence.secret(database)
    return Persistence(
        sql_persistence.SqlTokens(database),
        sql_persistence.SqlSessions(database),
        secret,
        partial(sql_persistence.secret, database, secret),
    )


def _redis_of(settings: Settings) -> RedisClient | None:
    url = settings.redis_url if settings.store.startswith("airflow://") else settings.store
    return RedisClient.from_url(url) if url.partition("://")[0] in SCHEMES else None


def mark_file(settings: Settings) -> Path:
    """Return where a service of this user keeps the mark of the store's state."""
    return state_folder() / f"{sha256(settings.store.encode()).hexdigest()[:16]}.mark"


def standalone(
    manager: GPUResourceManager,
    persistence: Persistence,
    *,
    open_to: str = "",
    client_secret: str = "",
    clock: Clock = time,
    **more: Any,
) -> Service:
    """Build the standalone service: protected by tokens, or open without them as `open_to` says.

    `open_to` is `loopback`, `everyone`, or empty: every caller needs a token, which a sign-on gives them if
    the cluster has a provider. `client_secret` is that of this service at the provider, `more` as of `build`.
    """
    known = TokenAuthenticator(persistence.tokens, persistence.sessions, clock.time)
    authenticator: Authenticator = known
    sign_on = None
    if open_to:
        authenticator = OpenAuthenticator(known, loopback_only=open_to == "loopback")
    else:
        sign_on = SignOnDesk(
            known,
            lambda: manager.read(lambda cluster, now: cluster.settings.sign_on, SIGN_ON_AGE_S),
            persistence.secret,
            client_secret,
        )
    instance = manager.settings.instance
    return build(
        manager, authenticator, persistence.secret, instance=instance, sign_on=sign_on, clock=clock, **more
    )


def build(
    manager: GPUResourceManager,
    authenticator: Authenticator,
    secret: str,
    *,
    rate: str = DEFAULT_RATE,
    threads: int = DEFAULT_THREADS,
    clock: Clock = time,
    **more: Any,
) -> Service:
    """Build a service around a manager; its metrics observe the manager, its replica answers the reads.

    `threads` are those that answer calls, of which one caller has a part; `more` are fields of `Service`.
    """
    checks.warn(manager.settings)
    watch = StateFollower(manager.store)
    receiver = ReportReceiver(manager)
    receiver.board.doorbell.follow(watch.on_look)  # before those who wait for it are asked
    held = HeldRequests(watch)
    metrics = Metrics(watch, on_commit=held.look_soon)
    manager.observe_by(metrics.manager.measured)
    manager.read_from(watch.read)
    manager.read_reports_by(REPORTS)
    metrics.registry.register(GpuGauges(watch, manager, receiver.silence))
    metrics.watch_service(held, lambda: bool(manager.store.closed), lambda: receiver.marks.is_behind)
    limits, accounts = Limits(rate, threads, clock.monotonic), AccountsCache(clock.monotonic)
    return Service(
        manager, authenticator, limits, watch, held, metrics, receiver, secret, accounts=accounts, **more
    )


def _secret_and_sessions(folder: Path) -> tuple[str, SessionStore]:
    """Return the secret and the sessions kept in the folder; those of this process where it is read-only."""
    try:
        secret = PrivateFile(folder / "session-secret", secret=True).create(secrets.token_hex(32)).strip()
        if secret:
            sessions = SessionFile(folder / "sessions.json")
            sessions.is_live("", "")  # so that a file that others may have written is told at the start
            return secret, sessions
    except OSError:
        pass
    return secrets.token_hex(32), MemorySessions()
