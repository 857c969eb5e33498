"""The history read backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from resource_manager.manager.results import Recorded

PAGE = 1000


def newest_changes(history: Callable[[int, int], Sequence[Recorded]], version: int) -> Iterator[Recorded]:
    """Yield the kept changes up to this version, the newest first, by pages of `history(after, limit)`."""
    while version > 0:
        start = max(version - PAGE, 0)
        page = [change for change in history(start, PAGE) if change["version"] <= version]
        if not page:
            return
        yield from reversed(page)
        version = start
