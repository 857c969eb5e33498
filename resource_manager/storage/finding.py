"""What a check of a store finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check; `ok` is false if the store does not work, or may lose data."""

    ok: bool
    text: str
