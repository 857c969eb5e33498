"""`Idempotency-Key`: a change that is sent twice happens once, and answers the same both times."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import flask

from resource_manager.api.problems import ProblemError, from_manager
from resource_manager.errors import ResourceManagerError, StoreUnavailableError

logger = logging.getLogger(__name__)

KEEP_S = 24 * 3600
KEEP_REFUSAL_S = 60
IN_FLIGHT_S = 120
MAX_KEY_LENGTH = 255
MAX_BODY_BYTES = 4096
"""An answer above this is kept as its status and hash."""
MAX_KEPT = 2000
"""Answers kept of one caller; beyond them its own oldest go, never another's."""


class ReplyStore(Protocol):
    """Remembers up to `MAX_KEPT` short texts of each caller for a while."""

    def claim(self, caller: str, key: str, value: str, keep_s: int) -> str | None:
        """Writes the value unless there is one; returns what was there."""

    def put(self, caller: str, key: str, value: str, keep_s: int) -> None:
        """Writes the value in the place of what was claimed, if that is still there."""

    def drop(self, caller: str, key: str) -> None: ...


class MemoryReplies:
    """In this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, OrderedDict[str, tuple[float, str]]] = {}

    def claim(self, caller: str, key: str, value: str, keep_s: int) -> str | None:
        now = time.monotonic()
        with self._lock:
            mine = self._kept.setdefault(caller, OrderedDict())
            found = mine.pop(key, None)
            if found is not None and found[0] > now:
                mine[key] = found
                return found[1]
            mine[key] = (now + keep_s, value)
            while len(mine) > MAX_KEPT:
                mine.popitem(last=False)
            return None

    def put(self, caller: str, key: str, value: str, keep_s: int) -> None:
        with self._lock:
            mine = self._kept.get(caller)
            if mine is not None and key in mine:
                mine[key] = (time.monotonic() + keep_s, value)

    def drop(self, caller: str, key: str) -> None:
        with self._lock:
            mine = self._kept.get(caller)
            if mine is not None:
                mine.pop(key, None)


class Replies:
    """Answers to keys seen before.

    A refusal (4xx) is an answer, kept for `KEEP_REFUSAL_S`. A failure of the service (5xx) is not kept: the
    caller should be able to try again with the same key.
    """

    def __init__(self, store: ReplyStore) -> None:
        self._store = store

    def once(
        self, caller: str, key: str, operation: str, body: bytes, run: Callable[[], flask.Response]
    ) -> flask.Response:
        """Runs the change, or repeats its answer; raises 409 while it runs, 422 for another body."""
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise ProblemError(400, f"Idempotency-Key has 1 to {MAX_KEY_LENGTH} characters")
        place = (_hash(caller.encode("utf-8", "replace")), _hash(key.encode("utf-8", "replace")))
        fingerprint = _hash(operation.encode() + b"\0" + body)
        found = self._store.claim(*place, json.dumps({"print": fingerprint}), IN_FLIGHT_S)
        if found is not None:
            return self._repeat(json.loads(found), fingerprint)
        try:
            response = run()
        except ProblemError as problem:
            response = problem.response()
        except ResourceManagerError as error:
            response = from_manager(error).response()
        except BaseException:
            self._store.drop(*place)
            raise
        if response.status_code >= 500:
            self._store.drop(*place)
            return response
        answer = response.get_data()
        kept = {
            "print": fingerprint,
            "status": response.status_code,
            "type": response.content_type,
            "bytes": len(answer),
        }
        if len(answer) <= MAX_BODY_BYTES:
            kept["body"] = answer.decode()
        else:
            kept["sha256"] = hashlib.sha256(answer).hexdigest()
        keep_s = KEEP_S if response.status_code < 400 else KEEP_REFUSAL_S
        try:
            self._store.put(*place, json.dumps(kept, ensure_ascii=False), keep_s)
        except StoreUnavailableError as error:  # the change was made, and its caller should hear of it
            logger.error("the answer to an Idempotency-Key is not kept: %s", error)
        return response

    @staticmethod
    def _repeat(kept: dict[str, Any], fingerprint: str) -> flask.Response:
        if kept["print"] != fingerprint:
            raise ProblemError(422, "this Idempotency-Key was used for another request")
        if "status" not in kept:
            raise ProblemError(
                409, "the first request with this key still runs", headers={"Retry-After": "1"}
            )
        if "body" in kept:
            answer = flask.Response(kept["body"], kept["status"], content_type=kept["type"])
        else:
            answer = _without_body(kept)
        answer.headers["Idempotent-Replay"] = "true"
        return answer


def _without_body(kept: dict[str, Any]) -> flask.Response:
    """The status of an answer that was too large to keep, and its hash."""
    size = f"its answer of {kept['bytes']:,} bytes was not kept (the limit is {MAX_BODY_BYTES:,})"
    hints = {"replayed": "status", "sha256": kept["sha256"]}
    if kept["status"] >= 400:
        detail = f"the first request with this key was refused; {size}: send it with another key"
        return ProblemError(kept["status"], detail, **hints).response()
    detail = f"this was done once, for the first request with this key; {size}: GET /api/task tells what a "
    answer = flask.jsonify(detail=f"{detail}task holds or waits for", **hints)
    answer.status_code = kept["status"]
    return answer


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
