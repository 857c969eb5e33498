"""Requests that wait without a thread of their own: the follower of the store resumes those that are due.

A server that can hold a request offers `PARK`. The request is carried out once, which admits its caller and
holds it; that answer is thrown away, and once it is resumed the request is carried out again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import flask

from resource_manager.rest.problems import ProblemError
from resource_manager.rest.state_follower import StateFollower

PARK = "gpu_manager.park"
"""Key of the WSGI environment, or the ASGI scope, with a function that returns a `Parked`."""

UNCHANGED = "gpu_manager.unchanged"
"""Key of the WSGI environment: true for a request that is resumed because its time is over."""

MAX_HELD_PER_CALLER = 64

GONE_EVERY_S = 1.0
"""Interval at which clients that left are looked for: one system call for each request."""


class Parked(NamedTuple):
    """Request kept by its server: `resume(is_due)` does it again, `is_gone` says if its client left."""

    resume: Callable[[bool], None]
    is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Held:
    caller: str
    is_due: Callable[[], bool]
    until: float
    parked: Parked


class HeldRequests:
    """Requests that wait until they are due; thread-safe."""

    def __init__(self, watch: StateFollower) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._callers: Counter[str] = Counter()
        self._gone_checked_at = 0.0
        watch.on_look(self._resume_due)

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self, caller: str, is_due: Callable[[], bool], timeout_s: float, *, answer_if_full: bool = False
    ) -> None:
        """Hold the current request until it is due: aborts here, and it is carried out again then.

        Returns if it is due now, or its server cannot hold it. `is_due` runs in the thread that follows the
        store: it must be quick. Raises `ProblemError` (429) beyond `MAX_HELD_PER_CALLER` requests of a
        caller; with `answer_if_full` it returns.
        """
        environ = flask.request.environ
        park = environ.get(PARK) or environ.get("asgi.scope", {}).get(PARK)
        if park is None or timeout_s <= 0 or is_due():
            return
        with self._lock:
            if self._watch.stopped:  # nobody would resume it
                return
            if self._callers[caller] >= MAX_HELD_PER_CALLER:
                if answer_if_full:
                    return
                detail = f"{MAX_HELD_PER_CALLER} of your requests wait for changes already: end one"
                raise ProblemError(429, detail, retry_after_s=5)
            self._callers[caller] += 1
            self._held.append(_Held(caller, is_due, time.monotonic() + timeout_s, park()))
        self._watch.follow()
        flask.abort(flask.Response(status=204))  # nobody gets it: this request is carried out again

    def look_soon(self) -> None:
        """Have the store read now: this process has just changed it."""
        if self._held:
            self._watch.look_soon()

    def _resume_due(self) -> None:
        now = time.monotonic()
        checks_gone = now >= self._gone_checked_at + GONE_EVERY_S
        if checks_gone:
            self._gone_checked_at = now
        with self._lock:
            ready = [
                (each, is_due)
                for each in self._held
                if (is_due := each.is_due())
                or now >= each.until
                or self._watch.stopped
                or (checks_gone and each.parked.is_gone())
            ]
            for each, _ in ready:
                self._held.remove(each)
                self._callers[each.caller] -= 1
            self._callers += Counter()  # drops those without any
        for each, is_due in ready:
            each.parked.resume(is_due)
