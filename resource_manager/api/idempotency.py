"""`Idempotency-Key`: a change that is sent twice happens once, and answers the same both times."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import flask

from resource_manager.api.problems import ProblemError, from_manager
from resource_manager.errors import ResourceManagerError

KEEP_S = 24 * 3600
IN_FLIGHT_S = 120
MAX_KEY_LENGTH = 255
MAX_KEPT = 10_000


class ReplyStore(Protocol):
    """Remembers short texts for a while."""

    def claim(self, key: str, value: str, keep_s: int) -> str | None:
        """Writes the value unless there is one; returns what was there."""

    def put(self, key: str, value: str, keep_s: int) -> None: ...

    def drop(self, key: str) -> None: ...


class MemoryReplies:
    """In this process; the oldest go when there are more than `MAX_KEPT`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def claim(self, key: str, value: str, keep_s: int) -> str | None:
        now = time.monotonic()
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0] > now:
                return found[1]
            self._keep(key, value, now + keep_s)
            return None

    def put(self, key: str, value: str, keep_s: int) -> None:
        with self._lock:
            self._keep(key, value, time.monotonic() + keep_s)

    def drop(self, key: str) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def _keep(self, key: str, value: str, until: float) -> None:
        self._kept[key] = (until, value)
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


class Replies:
    """Answers to keys seen before.

    A refusal is an answer. A failure of the service (5xx) is not kept: the caller should be able to try again
    with his key.
    """

    def __init__(self, store: ReplyStore) -> None:
        self._store = store

    def once(
        self, caller: str, key: str, operation: str, body: bytes, run: Callable[[], flask.Response]
    ) -> flask.Response:
        """Runs the change, or repeats its answer; raises 409 while it runs, 422 for another body."""
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise ProblemError(400, f"Idempotency-Key has 1 to {MAX_KEY_LENGTH} characters")
        name = hashlib.sha256("\0".join((caller, key)).encode("utf-8", "replace")).hexdigest()
        fingerprint = hashlib.sha256(operation.encode() + b"\0" + body).hexdigest()
        found = self._store.claim(name, json.dumps({"print": fingerprint}), IN_FLIGHT_S)
        if found is not None:
            return self._repeat(json.loads(found), fingerprint)
        try:
            response = run()
        except ProblemError as problem:
            response = problem.response()
        except ResourceManagerError as error:
            response = from_manager(error).response()
        except BaseException:
            self._store.drop(name)
            raise
        if response.status_code >= 500:
            self._store.drop(name)
            return response
        kept = {
            "print": fingerprint,
            "status": response.status_code,
            "type": response.content_type,
            "body": base64.b64encode(response.get_data()).decode(),
        }
        self._store.put(name, json.dumps(kept), KEEP_S)
        return response

    @staticmethod
    def _repeat(kept: dict[str, Any], fingerprint: str) -> flask.Response:
        if kept["print"] != fingerprint:
            raise ProblemError(422, "this Idempotency-Key was used for another request")
        if "status" not in kept:
            raise ProblemError(
                409, "the first request with this key still runs", headers={"Retry-After": "1"}
            )
        return flask.Response(
            base64.b64decode(kept["body"]),
            status=kept["status"],
            content_type=kept["type"],
            headers={"Idempotent-Replay": "true"},
        )
