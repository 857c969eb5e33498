"""Bearer tokens of the standalone service; only hashes are stored: in a file, in Redis or in a database."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from resource_manager.core.identifiers import MAX_TEXT, check_names
from resource_manager.errors import ResourceManagerError
from resource_manager.rest.private_file import PrivateFile

logger = logging.getLogger(__name__)

PREFIX = "gpm"
MAX_TEAMS = 50

USE_EVERY_S = 600.0
"""Time between two notes of a token's use, so that few calls write."""


class Role(IntEnum):
    """Role of a caller; each includes the rights of those before it, but `AGENT`, which reports only."""

    AGENT = 0
    READER = 1
    USER = 2
    OPERATOR = 3

    @classmethod
    def named(cls, name: str) -> Role:
        return cls[name.upper()]

    def includes(self, needed: Role) -> bool:
        """Return True if a caller of this role may do what that role may."""
        return self is needed if needed is Role.AGENT else self >= needed

    def __str__(self) -> str:
        return self.name.lower()


class TokenError(ResourceManagerError, ValueError):
    """Error of an unreadable token file or an invalid token name."""


@dataclass(frozen=True, slots=True)
class Token:
    """Stored part of a token: the name of its holder, the role, their teams, and the SHA-256 of its secret.

    Without teams its holder may name any, or none. `server` is the one that an agent reports. With
    `expires_at`, in seconds since 1970, it is worth nothing from then on. With `subject`, the person's id at
    the provider, it was made by a sign-on. With `run_jobs` agents run jobs for its holder. The
    secret has 256 random bits, so a plain hash is as hard to invert as a slow one.
    """

    token_id: str
    name: str
    role: str
    digest: str
    created_at: float
    teams: tuple[str, ...] = ()
    server: str = ""
    expires_at: float | None = None
    subject: str | None = None
    run_jobs: bool | None = None

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def row(self) -> dict[str, Any]:
        """Return the row to store; services that know no `expires_at` go on to read a token without one."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Token:
        """Return the token of a stored row; raises `TypeError` for another value."""
        teams = row.get("teams", [])
        if not isinstance(teams, list) or not all(isinstance(team, str) for team in teams):
            raise TypeError("teams must be a list of names")
        expires_at = row.get("expires_at")
        if str(row.get("role")).upper() not in Role.__members__ or not isinstance(row.get("name"), str):
            raise TypeError(f"a token has a name and a role of {', '.join(map(str, Role))}")
        if not isinstance(row.get("run_jobs"), bool | None):
            raise TypeError("run_jobs must be true or false")
        if not isinstance(row.get("subject"), str | None):
            raise TypeError("subject must be a text")
        if isinstance(expires_at, bool) or not isinstance(expires_at, int | float | None):
            raise TypeError("expires_at must be seconds since 1970")
        return cls(**{**row, "teams": tuple(teams)})


def tokens_of(texts: Iterable[str | bytes], where: str) -> dict[str, Token]:
    """Return the tokens of stored texts by their ids; those of a newer version are left out and logged."""
    found = {}
    for text in texts:
        try:
            token = Token.from_row(json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s: a token is left out, as this version cannot read it: %s", where, error)
        else:
            found[token.token_id] = token
    return found


def has_callers(tokens: Mapping[str, Token]) -> bool:
    """Return whether one of them is of others than agents, whose tokens send reports only."""
    return any(token.role != str(Role.AGENT) for token in tokens.values())


class TokenStore(Protocol):
    """Storage of the tokens' hashes, and of when each token was used last."""

    def read(self) -> dict[str, Token]: ...

    def put(self, token: Token) -> None: ...

    def delete(self, token_id: str) -> bool: ...

    def last_uses(self) -> dict[str, float]:
        """Return the time of the last noted use by token id, in seconds since 1970."""
        ...

    def note_use(self, token_id: str, at: float) -> None:
        """Note a use; it brings no token back that was revoked meanwhile."""
        ...


class TokenFile:
    """`TokenStore` in a JSON file that only its owner may change, with the uses in a second one beside it."""

    def __init__(self, path: Path) -> None:
        self._file = PrivateFile(path)
        self._uses = PrivateFile(path.with_suffix(".used.json"))

    def read(self) -> dict[str, Token]:
        try:
            text = self._file.read()
            return {row["token_id"]: Token.from_row(row) for row in json.loads(text or "[]")}
        except ResourceManagerError:
            raise
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise TokenError(f"{self._file.path}: not a token file: {error}") from error

    def put(self, token: Token) -> None:
        self._file.path.parent.mkdir(parents=True, exist_ok=True)
        with self._file.exclusive():
            self._write({**self.read(), token.token_id: token})

    def delete(self, token_id: str) -> bool:
        if not self._file.path.exists():
            return False
        with self._file.exclusive():
            tokens = self.read()
            found = tokens.pop(token_id, None) is not None
            if found:
                self._write(tokens)
            return found

    def last_uses(self) -> dict[str, float]:
        try:
            uses = json.loads(self._uses.read() or "{}")
            return {token_id: float(at) for token_id, at in uses.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise TokenError(f"{self._uses.path}: not a file of uses; remove it: {error}") from error

    def note_use(self, token_id: str, at: float) -> None:
        with self._uses.exclusive():
            tokens = self.read()
            kept = {known: at for known, at in self.last_uses().items() if known in tokens}
            self._uses.write(json.dumps({**kept, token_id: at}))

    def _write(self, tokens: dict[str, Token]) -> None:
        self._file.write(json.dumps([token.row() for token in tokens.values()], indent=1))


def create(
    store: TokenStore,
    name: str,
    role: Role,
    *,
    teams: Sequence[str] = (),
    server: str = "",
    expires_s: float | None = None,
    subject: str | None = None,
    run_jobs: bool = False,
    now: Callable[[], float] = time.time,
) -> str:
    """Create a token for a holder and return its text, which is not stored.

    With `teams` its holder may name these only. An agent's token is bound to its `server`. It expires after
    `expires_s` seconds, or never. That of a sign-on has the person's `subject`. Raises `TokenError` and
    `InvalidRequestError`.
    """
    if not name or len(name) > 100:
        raise TokenError(f"a token's name must have 1 to 100 characters, got {name[:200]!a}")
    if len(teams) > MAX_TEAMS or any(not 0 < len(team) <= MAX_TEXT for team in teams):
        raise TokenError(f"a token has at most {MAX_TEAMS} teams, each of 1 to {MAX_TEXT} characters")
    if bool(server) != (role is Role.AGENT):
        raise TokenError("a token of role agent names the server that it reports; other tokens name none")
    if run_jobs and not role.includes(Role.USER):
        raise TokenError(f"a token of role {role} runs no jobs: leave out --run-jobs, or make it a user's")
    if len(server) > MAX_TEXT:
        raise TokenError(f"a server's name has at most {MAX_TEXT} characters")
    check_names({"name": (name,), "teams": teams, "server": (server,)})
    at = now()
    expires_at = None if expires_s is None else at + expires_s
    return _issue(
        store, Token("", name, str(role), "", at, tuple(teams), server, expires_at, subject, run_jobs or None)
    )


def rotate(
    store: TokenStore,
    token_id: str,
    *,
    expires_s: float | None = None,
    overlap_s: float = 0.0,
    now: Callable[[], float] = time.time,
) -> str:
    """Create a token with the rights of another and return its text; the other one ends after `overlap_s`.

    Without `expires_s` it lives as long as the other was made for. Sessions begun with the other token end
    with it. Raises `TokenError` if there is no such token.
    """
    old = store.read().get(token_id)
    if old is None:
        raise TokenError(f"there is no token {token_id[:100]!a}: gpu-manager token list shows the ids")
    at = now()
    if expires_s is None and old.expires_at is not None:
        expires_s = old.expires_at - old.created_at
    expires_at = None if expires_s is None else at + expires_s
    text = _issue(store, replace(old, created_at=at, expires_at=expires_at))
    if overlap_s > 0:
        ends_at = min(at + overlap_s, float("inf") if old.expires_at is None else old.expires_at)
        store.put(replace(old, expires_at=ends_at))
    else:
        store.delete(token_id)
    return text


def _issue(store: TokenStore, holder: Token) -> str:
    """Store the token under a new id with a new secret, and return its text."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    store.put(replace(holder, token_id=token_id, digest=_digest(secret)))
    return f"{PREFIX}_{token_id}_{secret}"


def find(tokens: dict[str, Token], text: str) -> Token | None:
    """Return the token with this text, or None; take the same time for any wrong secret."""
    prefix, _, rest = text.partition("_")
    token_id, _, secret = rest.partition("_")
    token = tokens.get(token_id)
    expected = token.digest if token is not None else _digest("")
    same = hmac.compare_digest(expected, _digest(secret))
    return token if same and prefix == PREFIX else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
