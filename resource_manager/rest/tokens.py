"""Bearer tokens of the standalone service; only their hashes are stored, in a file or in Redis."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from resource_manager.core.identifiers import MAX_TEXT, check_names
from resource_manager.errors import ResourceManagerError
from resource_manager.rest.private_file import PrivateFile

logger = logging.getLogger(__name__)

PREFIX = "gpm"
MAX_TEAMS = 50


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

    Without teams its holder may name any, or none. `server` is the one that an agent reports. The secret has
    256 random bits, so a plain hash is as hard to invert as a slow one.
    """

    token_id: str
    name: str
    role: str
    digest: str
    created_at: float
    teams: tuple[str, ...] = ()
    server: str = ""

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Token:
        """Return the token of a stored row; raises `TypeError` for another value."""
        teams = row.get("teams", [])
        if not isinstance(teams, list) or not all(isinstance(team, str) for team in teams):
            raise TypeError("teams must be a list of names")
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


class TokenStore(Protocol):
    """Storage of the tokens' hashes."""

    def read(self) -> dict[str, Token]: ...

    def put(self, token: Token) -> None: ...

    def delete(self, token_id: str) -> bool: ...


class TokenFile:
    """`TokenStore` in a JSON file that only its owner may change."""

    def __init__(self, path: Path) -> None:
        self._file = PrivateFile(path)

    def read(self) -> dict[str, Token]:
        try:
            text = self._file.read()
            return {row["token_id"]: Token.from_row(row) for row in json.loads(text or "[]")}
        except ResourceManagerError:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
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

    def _write(self, tokens: dict[str, Token]) -> None:
        self._file.write(json.dumps([asdict(token) for token in tokens.values()], indent=1))


def create(
    store: TokenStore,
    name: str,
    role: Role,
    *,
    teams: Sequence[str] = (),
    server: str = "",
    now: Callable[[], float] = time.time,
) -> str:
    """Create a token for a holder and return its text, which is not stored.

    With `teams` its holder may name these only. An agent's token is bound to its `server`. Raises
    `TokenError` and `InvalidRequestError`.
    """
    if not name or len(name) > 100:
        raise TokenError(f"a token's name must have 1 to 100 characters, got {name[:200]!a}")
    if len(teams) > MAX_TEAMS or any(not 0 < len(team) <= MAX_TEXT for team in teams):
        raise TokenError(f"a token has at most {MAX_TEAMS} teams, each of 1 to {MAX_TEXT} characters")
    if bool(server) != (role is Role.AGENT):
        raise TokenError("a token of role agent names the server that it reports; other tokens name none")
    if len(server) > MAX_TEXT:
        raise TokenError(f"a server's name has at most {MAX_TEXT} characters")
    check_names({"name": (name,), "teams": teams, "server": (server,)})
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    store.put(Token(token_id, name, str(role), _digest(secret), now(), tuple(teams), server))
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
