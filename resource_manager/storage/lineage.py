"""What led to the state that a store's users know, so that they notice another one under its name."""

from __future__ import annotations

from collections import OrderedDict

KEPT = 1000
"""Versions that are known: a replica that lags behind more commits of its own process is not compared."""

NO_COMMIT = "-"
"""In the place of an id where no commit led to a version: a state was written as a whole."""


class Lineage:
    """Ids of the commits that led to the versions of a store's replicas, by incarnation and version.

    Not one for each replica: it is brought up to date outside of the store, too. Threads share it without a
    lock, as each step is one of the dictionary.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[str, int], str] = OrderedDict()

    def id_of(self, incarnation: str, version: int) -> str:
        """Return the id behind the version of a replica, empty if it is not known; it stays known."""
        known = incarnation, version
        try:
            self._ids.move_to_end(known)
        except KeyError:
            return ""
        return self._ids.get(known, "")

    def note(self, incarnation: str, version: int, commit_id: str) -> None:
        """Note which commit led to a version, empty for none.

        The first note stays: a replica that is refused must not pass because somebody read the other state.
        """
        self._ids.setdefault((incarnation, version), commit_id or NO_COMMIT)
        if len(self._ids) > KEPT:
            self._ids.popitem(last=False)
