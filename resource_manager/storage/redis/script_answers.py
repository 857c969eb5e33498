"""Answers of the scripts: a status, the server's time in two numbers, a version, a detail, and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from resource_manager import errors
from resource_manager.storage import refusals
from resource_manager.storage.base import Suspension
from resource_manager.storage.codec import change_from_json, check_format, is_known
from resource_manager.storage.once import References
from resource_manager.storage.outage import outage
from resource_manager.storage.redis.server_errors import MEMORY_FULL


def refuse(answer: Sequence[Any], where: str, version: int, once: References, window_s: float) -> NoReturn:
    """Raise what an answer of the server `where` means that did not do what was decided on the version.

    `window_s` is the length of the recovery window.
    """
    status, stored, detail = answer[0].decode(), answer[3], answer[4].decode()
    match status:
        case "stale":
            missed = answer[5] if len(answer) > 5 else ()
            with refusals.reading(where):
                raise errors.StaleStateError(version, stored, missed=tuple(map(change_from_json, missed)))
        case "full":
            raise outage(f"{where}: {MEMORY_FULL}", errors.StoreFullError)
        case "repeated":
            raise errors.RepeatedError(once[int(detail) - 1][0], answer[5].decode(errors="replace"))
        case "closed":
            raise errors.StateClosedError(where, detail)
        case "locked":
            raise errors.LockedError(version)
        case "clock":
            raise refusals.off_the_clock(version, stored)
        case "suspended":
            left_s, _, clock_jump_s = detail.partition(" ")
            raise refusals.unconfirmed(window_s, float(left_s), float(clock_jump_s or 0))
        case "format":
            check_format(detail, f"the state in {where}")
    present = {"behind": stored, "lost": refusals.ANOTHER_STATE}
    raise refusals.lost(where, version, present.get(status, status))


def suspension_in(detail: bytes, now: float) -> Suspension:
    """Return the suspension of grants that a detail tells: the seconds left, and those of a clock jump."""
    left_s, _, clock_jump_s = detail.partition(b" ")
    return Suspension(now + float(left_s or 0), float(clock_jump_s or 0))


def known_entries(flat: Sequence[bytes]) -> list[bytes]:
    """Return the fields of a hash, each with its text, without those of changes that are not known."""
    return [
        part
        for name, text in zip(flat[::2], flat[1::2], strict=True)
        if not text.startswith(b'{"change"') or all(map(is_known, text.splitlines()))
        for part in (name, text)
    ]
