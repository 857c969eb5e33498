"""`Idempotency-Key`: a change that is sent twice is made once and gets the same answer twice."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import flask

from resource_manager.errors import ResourceManagerError, StoreError
from resource_manager.rest.problems import ProblemError, from_manager

logger = logging.getLogger(__name__)

KEEP_S = 24 * 3600
KEEP_REFUSAL_S = 60
IN_FLIGHT_S = 120
MAX_KEY_LENGTH = 255
MAX_BODY_BYTES = 4096
"""Largest answer kept whole; of a larger one the status and the hash are kept."""
MAX_KEPT = 2000
"""Answers kept for one caller, and as many refusals; more push out the caller's oldest, never another's."""


class ReplyStore(Protocol):
    """Storage of short texts of each caller, each for a limited time.

    Up to `MAX_KEPT` claims and refusals of each caller are kept, and as many other answers: neither
    displaces the other, nor anything of another caller. `put` and `drop` do nothing if the claim was
    displaced, expired, or replaced by the claim of a later request.
    """

    def claim(self, caller: str, key: str, value: str, keep_s: int) -> str | None:
        """Write the value if there is none and return None, else return the present value."""

    def put(self, caller: str, key: str, claimed: str, value: str, keep_s: int) -> None:
        """Replace the claim by the value: an answer if `keep_s` is `KEEP_S`, else a refusal."""

    def drop(self, caller: str, key: str, claimed: str) -> None:
        """Remove the claim."""


class MemoryIdempotencyCache:
    """`ReplyStore` in the memory of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bool], OrderedDict[str, tuple[float, str]]] = {}

    def claim(self, caller: str, key: str, value: str, keep_s: int) -> str | None:
        now = time.monotonic()
        with self._lock:
            for is_long in (True, False):
                found = self._of(caller, is_long).get(key)
                if found is not None and found[0] > now:
                    return found[1]
            self._add(caller, False, key, now + keep_s, value)
            return None

    def put(self, caller: str, key: str, claimed: str, value: str, keep_s: int) -> None:
        with self._lock:
            if self._take(caller, key, claimed):
                self._add(caller, keep_s == KEEP_S, key, time.monotonic() + keep_s, value)

    def drop(self, caller: str, key: str, claimed: str) -> None:
        with self._lock:
            self._take(caller, key, claimed)

    def _of(self, caller: str, is_long: bool) -> OrderedDict[str, tuple[float, str]]:
        return self._kept.setdefault((caller, is_long), OrderedDict())

    def _take(self, caller: str, key: str, claimed: str) -> bool:
        short = self._of(caller, False)
        if short.get(key, (0.0, ""))[1] != claimed:
            return False
        del short[key]
        return True

    def _add(self, caller: str, is_long: bool, key: str, until: float, value: str) -> None:
        kept = self._of(caller, is_long)
        kept.pop(key, None)
        kept[key] = (until, value)
        while len(kept) > MAX_KEPT:
            kept.popitem(last=False)


class IdempotencyCache:
    """Cache of answers by caller and idempotency key.

    A refusal (4xx) is an answer and kept for `KEEP_REFUSAL_S`. A failure of the service (5xx) is not kept, so
    that the caller can try again with the same key.
    """

    def __init__(self, store: ReplyStore, lock_timeout_s: float = 60.0) -> None:
        self._store = store
        # The claim must outlive its request, which may wait for the lock twice.
        self._in_flight_s = math.ceil(max(IN_FLIGHT_S, 2 * lock_timeout_s + 60))

    def once(
        self, caller: str, key: str, operation: str, body: bytes, run: Callable[[], flask.Response]
    ) -> flask.Response:
        """Run the change or repeat its answer; raise 409 while it runs, 422 for another request."""
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise ProblemError(400, f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters")
        place = (_hash(caller.encode("utf-8", "replace")), _hash(key.encode("utf-8", "replace")))
        fingerprint = _hash(operation.encode() + b"\0" + body)
        claimed = json.dumps({"fingerprint": fingerprint, "claim": secrets.token_hex(8)})
        found = self._store.claim(*place, claimed, self._in_flight_s)
        if found is not None:
            return self._repeat(found, fingerprint)
        try:
            response = run()
        except ProblemError as problem:
            response = problem.response()
        except ResourceManagerError as error:
            response = from_manager(error).response()
        except BaseException:
            self._forget(*place, claimed)
            raise
        if response.status_code >= 500:
            self._forget(*place, claimed)
            return response
        answer = response.get_data()
        kept = {
            "fingerprint": fingerprint,
            "status": response.status_code,
            "type": response.content_type,
            "bytes": len(answer),
        }
        body_kept = ""
        if len(answer) <= MAX_BODY_BYTES:
            body_kept = answer.decode()
        else:
            kept["sha256"] = hashlib.sha256(answer).hexdigest()
        keep_s = KEEP_S if response.status_code < 400 else KEEP_REFUSAL_S
        try:
            # The body stands behind the JSON: within it, quotes could make it twice as long.
            self._store.put(*place, claimed, f"{json.dumps(kept)}\n{body_kept}", keep_s)
        except StoreError as error:  # the change was made, so the caller must get its answer
            logger.error("the answer to an Idempotency-Key is not kept: %s", error)
        return response

    def _forget(self, caller: str, key: str, claimed: str) -> None:
        try:
            self._store.drop(caller, key, claimed)
        except StoreError as error:  # the first error must reach the caller
            logger.error("the claim of an Idempotency-Key is not removed before it expires: %s", error)

    @staticmethod
    def _repeat(found: str, fingerprint: str) -> flask.Response:
        head, _, body = found.partition("\n")
        kept = json.loads(head)
        if kept["fingerprint"] != fingerprint:
            raise ProblemError(422, "this Idempotency-Key was used for another request: use a new key")
        if "status" not in kept:
            raise ProblemError(
                409,
                "the first request with this key is still running: try again later",
                headers={"Retry-After": "1"},
            )
        if "sha256" not in kept:
            answer = flask.Response(body, kept["status"], content_type=kept["type"])
        else:
            answer = _without_body(kept)
        answer.headers["Idempotent-Replay"] = "true"
        return answer


def _without_body(kept: dict[str, Any]) -> flask.Response:
    """Return the status and the hash of an answer that was too large to keep."""
    size = f"its answer of {kept['bytes']:,} bytes was not kept (the limit is {MAX_BODY_BYTES:,})"
    hints = {"replayed": "status", "sha256": kept["sha256"]}
    if kept["status"] >= 400:
        detail = f"the first request with this key was refused; {size}: send it with another key"
        return ProblemError(kept["status"], detail, **hints).response()
    detail = f"the first request with this key was done, and this one changed nothing; {size}: "
    answer = flask.jsonify(detail=f"{detail}GET /api/task shows the lease or pending request", **hints)
    answer.status_code = kept["status"]
    return answer


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
