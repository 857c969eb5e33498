"""Idempotency keys: a change that is sent again is not made again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from resource_manager.errors import IdempotencyKeyError

KEEP_S = 24 * 3600
"""Seconds for which a key is known; a change sent again later is a new one."""

MAX_KEYS = 100_000
"""Keys kept for one caller, about: a call with another is refused, as none is forgotten before its time."""


class Once:
    """Key of one change of one caller; `fingerprint` is a hash of what it asks for.

    A store keeps the key with a reference to what the change did, in the commit of the change. `repeated` is
    True once a store has found the key: the change was made before.
    """

    __slots__ = ("caller", "fingerprint", "key", "repeated")

    def __init__(self, caller: str, key: str, fingerprint: str) -> None:
        self.caller = digest(caller)
        self.key = digest(key)
        self.fingerprint = fingerprint
        self.repeated = False

    def part(self, start: int) -> Once:
        """Return the key of a part of the change that is made by itself: the items from `start`."""
        part = Once("", "", self.fingerprint)
        part.caller, part.key = self.caller, digest(f"{self.key} {start}")
        return part

    def stored(self, reference: str) -> str:
        """Return the text that a store keeps under the key."""
        return f"{self.fingerprint} {reference}"

    def reference_in(self, stored: str) -> str:
        """Return the reference in a stored text; raises `IdempotencyKeyError` if another request's."""
        fingerprint, _, reference = stored.partition(" ")
        if fingerprint != self.fingerprint:
            raise IdempotencyKeyError("this idempotency key was used for another request: use a new key")
        self.repeated = True
        return reference


References = Sequence[tuple[Once, str]]
"""Idempotency keys, each with a reference to what is done under it."""


def digest(text: str) -> str:
    """Return 128 bits that stand for the text, however long it is."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
