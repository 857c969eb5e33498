"""Connections to Redis from a URL, and Lua scripts from files."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from resource_manager.errors import SettingsError, StoreError, redact
from resource_manager.storage.redis import SCHEMES
from resource_manager.storage.redis.server_errors import error_of

try:
    from hiredis import pack_command
except ImportError:  # the driver does without
    pack_command = None  # type: ignore[assignment]

DEFAULT_NAMESPACE = "gpu_manager"
SOCKET_TIMEOUT_S = 5.0

MAX_TRIES = 4
"""How often commands are sent, each time on a new connection, if connections break."""

MIN_BLOCK_S = 0.002
"""Shortest timeout of a blocking read: Redis 6 takes 0.001 for 0, which is none."""

AWAKE_S = 200e-6
QUICK_S = 400e-6
"""A client whose last answer took less than this waits for the next one awake, at most for `AWAKE_S`:
to sleep and be woken takes longer than Redis does, and as much processor time. Behind a lock, on a busy
server or across a network answers take longer, and it sleeps; a quick one reaches a sleeper after 0.25 ms."""

RIGHTS = "+@read +@write -@dangerous -@scripting -scan -randomkey +eval +evalsha +info +time"
"""The rights that a Redis user needs besides the keys of its namespace; docs/stores.md gives the reasons."""

Command = Sequence[Any]
"""Name and arguments of a command."""

Text = tuple[str, str | bytes | int, float | None]
"""Key, text, and seconds to keep it, None for good."""


def blocking_read(key: str, timeout_s: float) -> Command:
    """Return the command that waits until something is pushed to a list, and takes it away."""
    return "BLPOP", key, max(timeout_s, MIN_BLOCK_S)


class RedisClient:
    """A pool of connections to one Redis server, and its address without the password.

    `namespace` is the hash tag that all keys share, so that a Redis Cluster keeps them together.
    """

    def __init__(self, driver: redis.Redis, address: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.driver = driver
        self.address = address
        self.namespace = namespace
        self._idle: list[Any] = []
        self.contended = False
        """Whether the last claim on a lock had to wait: then the next one will, too."""
        self._answered_in_s = 0.0
        self._timeout_s: float = driver.connection_pool.connection_kwargs["socket_timeout"]

    @classmethod
    def from_url(cls, url: str) -> RedisClient:
        """Return a client that connects on first use; `?namespace=` in the URL separates several states.

        Raises `SettingsError`.
        """
        try:
            parts = urlsplit(url)
        except ValueError as error:  # brackets without an IPv6 address; it may quote the password
            raise SettingsError(f"wrong Redis URL {redact(url)!r}: its host is wrong") from error
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise SettingsError(f"{redact(url)!r} is not a Redis URL; it must begin with one of {known}")
        base = url.partition("?")[0]
        query = dict(parse_qsl(parts.query))
        namespace = query.pop("namespace", DEFAULT_NAMESPACE)
        if not re.fullmatch(r"[\w.:-]+", namespace):
            raise SettingsError(
                f"wrong Redis URL {redact(url)!r}: a namespace may have letters, digits and "
                f"_.:- only, not {namespace!r}"
            )
        try:
            if "@" in parts.path and parts.scheme != "unix":  # the errors below would quote a part of it
                raise ValueError("write / in its password as %2F")
            if parts.scheme == "redis+sentinel":
                driver = _through_sentinels(parts.netloc, parts.path, query)
            else:
                _check_path(parts.scheme, parts.path)
                query.pop("decode_responses", None)  # the stores read bytes
                driver = redis.Redis.from_url(f"{base}?{urlencode(query)}", **_options())
                # The driver would report an unknown option only when it connects.
                pool = driver.connection_pool
                pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError, redis.exceptions.RedisError) as error:
            unknown = re.search("unexpected keyword argument ('.*')", str(error))
            reason = "its port is not a number" if "Port could not" in str(error) else str(error)
            reason = f"{unknown[1]} is no option of it" if unknown else reason
            raise SettingsError(f"wrong Redis URL {redact(url)!r}: {reason}") from error
        return cls(driver, f"Redis at {redact(url)}", namespace)

    def key(self, name: str) -> str:
        """Return the full name of a key of this namespace."""
        return f"{{{self.namespace}}}:{name}"

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script, loading it first if the server does not have it (any more)."""
        try:
            try:
                return self.ask(script.command(keys, args))[0]
            except redis.exceptions.NoScriptError:
                return self.ask(("EVAL", script.text, len(keys), *keys, *args))[0]
        except redis.exceptions.RedisError as error:  # as in `reporting`, which takes longer
            raise self._reported(error) from error

    def ask(self, *commands: Command) -> list[Any]:
        """Return the server's answers, on a connection of this client's own: in half the driver's time.

        All are sent before the first answer is read, and again if the connection breaks: also one to a server
        that is a replica by now, as its address may lead to another. The driver asks through sentinels: its
        pool knows when they name another primary. Raises the driver's errors, in the place of all answers.
        """
        driver: Any = self.driver
        pool = driver.connection_pool
        if type(pool) is not redis.ConnectionPool:
            try:
                return self._ask_driver(commands)
            except redis.exceptions.TimeoutError:  # perhaps only of a connection that was cut off
                return self._ask_driver(commands)
        connection, is_idle = self._connection(pool)
        failed = 0
        while True:
            try:
                answers = self._exchange(connection, commands)
            except redis.exceptions.RedisError as error:
                if not _is_broken(error):
                    self._idle.append(connection)
                    raise
                connection.disconnect()
                failed += 1
                # One that was idle may have been cut off; a new one says that the server does not answer.
                is_mute = isinstance(error, redis.exceptions.TimeoutError) and not is_idle
                if failed == MAX_TRIES or is_mute:
                    raise
                is_idle = False
                time.sleep(0.02 * (failed - 1))
            except BaseException:  # perhaps between question and answer
                connection.disconnect()
                raise
            else:
                self._idle.append(connection)
                return answers

    def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        """Send the commands and read all answers; raises the first error among them."""
        asked_at = time.monotonic()
        for command in commands:
            if pack_command is None:
                connection.send_command(*command)
            else:  # as the driver does, in half the time
                connection.send_packed_command([pack_command(tuple(command))])
        if self._answered_in_s < QUICK_S:
            _wait_awake(connection, asked_at + AWAKE_S)
        answers, error = [], None
        for _ in commands:
            try:
                answers.append(connection.read_response())
            except redis.exceptions.ResponseError as refused:
                error = error or refused
        self._answered_in_s = time.monotonic() - asked_at
        if error is not None:
            raise error
        return answers

    def _connection(self, pool: Any) -> tuple[Any, bool]:
        """Return an idle connection, none from before a fork, or a new one; and whether it was idle."""
        try:
            while True:
                connection = self._idle.pop()
                if connection.pid == os.getpid():
                    return connection, True
        except IndexError:
            return pool.make_connection(), False

    def _ask_driver(self, commands: Sequence[Command]) -> list[Any]:
        pipe: Any = self.driver.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = pipe.execute()
        return answers

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Turn the driver's errors into one-line `StoreUnavailableError` and `CorruptStateError`."""
        try:
            yield
        except redis.exceptions.RedisError as error:
            raise self._reported(error) from error

    def _reported(self, error: redis.exceptions.RedisError) -> StoreError:
        return error_of(error, self.address, self.namespace, self._timeout_s)

    def hash_of(self, key: str) -> dict[bytes, bytes]:
        """Return the fields of a hash."""
        with self.reporting():
            [flat] = self.ask(("HGETALL", key))
        # Through sentinels the driver makes a mapping of it.
        return flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))

    def texts(self, beginning: str, names: Iterable[str]) -> dict[str, bytes]:
        """Return the texts of those names that have one, each under a key with that beginning."""
        every = list(names)
        if not every:
            return {}
        with self.reporting():
            [texts] = self.ask(("MGET", *(self.key(f"{beginning}{name}") for name in every)))
        return {name: text for name, text in zip(every, texts, strict=True) if text is not None}

    def put(self, *texts: Text) -> None:
        """Write texts, also while the server's memory is full: what they take must be bounded otherwise."""
        args: list[str | bytes | int] = []
        for _, text, life_s in texts:
            args += text, "" if life_s is None else max(round(1000 * life_s), 1)
        self.run(load_script("put"), [key for key, _, _ in texts], args)

    def block_on(self, key: str, timeout_s: float) -> bytes | None:
        """Sleep until something is pushed to the list, and take it away; return None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self.reporting():
            # In parts well below the socket's timeout.
            while (left_s := deadline - time.monotonic()) > 0:
                [found] = self.ask(blocking_read(key, min(left_s, self._timeout_s / 2)))
                if found:
                    value: bytes = found[1]
                    return value
        return None

    def time(self) -> float:
        """Return the seconds since the epoch by the server's clock."""
        with self.reporting():
            [(seconds, micros)] = self.ask(("TIME",))
        return int(seconds) + int(micros) * 1e-6

    @property
    def access_rule(self) -> str:
        """Keys and rights of a Redis user restricted to this namespace."""
        return f"~{{{self.namespace}}}:* {RIGHTS}"

    def may_flush(self) -> bool:
        """Return whether this Redis user can empty or swap databases, including other namespaces."""
        return bool(self.run(load_script("may_flush"), (), ()))

    def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop().disconnect()
        self.driver.close()
        self.driver.connection_pool.disconnect()


class Script:
    """The text of a Lua script and the name under which Redis caches it."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str], args: Sequence[Any]) -> Command:
        """Return the command that runs the script, if the server has it."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


@cache
def load_script(*names: str) -> Script:
    """Return the script that joins these files of the folder `lua`."""
    folder = files("resource_manager.storage.redis") / "lua"
    return Script("\n".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names))


def _wait_awake(connection: Any, until: float) -> None:
    """Return once an answer begins to arrive, or then by the monotonic clock; at once where nobody can tell.

    The driver's own look takes several times as long.
    """
    try:
        poller = select.poll()
        poller.register(connection._sock, select.POLLIN)
    except (AttributeError, TypeError):  # Windows has no poll; another driver may name its socket otherwise
        return
    while not poller.poll(0) and time.monotonic() < until:
        pass


def _options() -> dict[str, Any]:
    return {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        # Not for one that does not answer: to connect, the driver would wait for it time and again.
        "retry": Retry(ExponentialBackoff(cap=0.25, base=0.02), 2, (redis.exceptions.ConnectionError,)),
        "max_connections": 2**31,  # each thread that waits has one, and the driver's own limit is 100
    }


def _check_path(scheme: str, path: str) -> None:
    if scheme == "unix":
        if not path.strip("/"):
            raise ValueError("it names no socket, as in unix:///run/redis.sock")
    elif path not in {"", "/"} and not path[1:].isdigit():
        raise ValueError(f"{path[1:]!r} is not the number of a database, as in redis://host:6379/0")


def _through_sentinels(netloc: str, path: str, query: dict[str, str]) -> redis.Redis:
    """Connect by redis+sentinel://user:password@host:port,host:port/service/db?sentinel_password=…&ssl=true"""
    login, _, addresses = netloc.rpartition("@")
    user, _, password = login.partition(":")
    service, _, database = path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service, as in redis+sentinel://host:26379/mymaster/0")
    if database and not database.isdigit():
        raise ValueError(f"{database!r} is not the number of a database")
    sentinels = []
    for address in addresses.split(","):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{address!r} is not host:port of a sentinel")
        sentinels.append((host, int(port)))
    ssl = query.pop("ssl", "false").lower() == "true"
    sentinel_login = {
        "username": query.pop("sentinel_username", None),
        "password": query.pop("sentinel_password", None),
    }
    if query:
        raise ValueError(f"unknown option {sorted(query)[0]!r}")
    brief = {**_options(), "socket_timeout": 1.0, "socket_connect_timeout": 1.0, "ssl": ssl}
    sentinel = Sentinel(sentinels, sentinel_kwargs={**brief, **sentinel_login})  # type: ignore[no-untyped-call]
    driver: redis.Redis = sentinel.master_for(  # type: ignore[no-untyped-call]
        service,
        db=int(database or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        ssl=ssl,
        **_options(),
    )
    return driver


def _is_broken(error: redis.exceptions.RedisError) -> bool:
    """Return whether another connection may do better."""
    broken = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
    return isinstance(error, broken) or "read only replica" in str(error)
