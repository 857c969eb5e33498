"""Calls of a lease service that are made again while it does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from resource_manager.errors import ResourceManagerError, is_outage

T = TypeVar("T")

ASK_AGAIN_S = 1.0


def patiently(
    call: Callable[[], T],
    limit_s: float,
    pause: Callable[[float], object] = time.sleep,
    may_pass: Callable[[ResourceManagerError], bool] = is_outage,
) -> T:
    """Return what a call gives that may be made again, at last, once its errors have passed within a time."""
    ends_at = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except ResourceManagerError as error:
            if not may_pass(error) or time.monotonic() > ends_at:
                raise
        pause(ASK_AGAIN_S)
