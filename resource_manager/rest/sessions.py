"""Sessions of browsers on the server's side: one that is not here is over, whatever the cookie says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from resource_manager.errors import SettingsError
from resource_manager.rest.private_file import PrivateFile

SESSION_LIFE_S = 12 * 3600
MAX_SESSIONS = 16
"""Sessions of one token; beyond them the oldest ends."""

Ends = dict[str, dict[str, float]]
"""The end of each session, in seconds since 1970, by token id and session id."""


class SessionStore(Protocol):
    """Storage of the sessions of each token."""

    def begin(self, token_id: str, session_id: str) -> None: ...

    def is_live(self, token_id: str, session_id: str) -> bool: ...

    def end(self, token_id: str, session_id: str) -> None: ...


class MemorySessions:
    """`SessionStore` of one process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ends: Ends = {}

    def begin(self, token_id: str, session_id: str) -> None:
        self._ends = with_session(self._ends, token_id, session_id, self._clock())

    def is_live(self, token_id: str, session_id: str) -> bool:
        return self._ends.get(token_id, {}).get(session_id, 0) > self._clock()

    def end(self, token_id: str, session_id: str) -> None:
        self._ends.get(token_id, {}).pop(session_id, None)


class SessionFile:
    """`SessionStore` in a JSON file beside the tokens, for services that share the file of tokens."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = PrivateFile(path, secret=True)
        self._clock = clock

    def begin(self, token_id: str, session_id: str) -> None:
        with self._file.exclusive():
            self._file.write(json.dumps(with_session(self._read(), token_id, session_id, self._clock())))

    def is_live(self, token_id: str, session_id: str) -> bool:
        return self._read().get(token_id, {}).get(session_id, 0) > self._clock()

    def end(self, token_id: str, session_id: str) -> None:
        with self._file.exclusive():
            ends = self._read()
            if ends.get(token_id, {}).pop(session_id, None) is not None:
                self._file.write(json.dumps(ends))

    def _read(self) -> Ends:
        text = self._file.read()
        try:
            return {
                token_id: {name: float(end) for name, end in of_token.items()}
                for token_id, of_token in json.loads(text or "{}").items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SettingsError(f"{self._file.path}: not a file of sessions; remove it") from error


def with_session(ends: Ends, token_id: str, session_id: str, now: float) -> Ends:
    """Return the sessions with a new one, without those that are over or too many of its token."""
    live = {
        token: {name: end for name, end in of_token.items() if end > now} for token, of_token in ends.items()
    }
    mine = [*live.get(token_id, {}).items(), (session_id, now + SESSION_LIFE_S)][-MAX_SESSIONS:]
    return {token: of_token for token, of_token in {**live, token_id: dict(mine)}.items() if of_token}
