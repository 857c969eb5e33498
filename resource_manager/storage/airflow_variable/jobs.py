"""Jobs of requests and their results in Airflow Variables, one each: Airflow encrypts and masks them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from resource_manager.storage.airflow_variable.access import VariableAccess
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import digest
from resource_manager.storage.outage import outage

TRIES = 20
"""Most writes of a Variable that others write at the same time: one of them succeeds each time."""

Listed = dict[str, list[Any]]


class VariableJobs:
    """`JobStore` beside the state in a Variable; rows that hang on no commit are written without its lock.

    A Variable `<variable>_jobs` lists the others: of each, whose it is, its size and its end. `secret` in
    their names has Airflow mask them. Whoever lists a row reads the list again, and lists it once more if it
    is gone. So one case remains: a task, whose access cannot compare, stands still between its read of the
    list and its write for longer than others take to list their rows and look. These are dropped then.
    """

    def __init__(self, access: VariableAccess, variable: str, clock: Callable[[], float]) -> None:
        self._access = access
        self._prefix = f"{variable}_secret_job_"
        self._list = f"{variable}_jobs"
        self._clock = clock

    def write(self, rows: Sequence[JobRow]) -> None:
        """Store the rows of a commit, or of none, and drop what has reached its end."""
        now = self._clock()
        if rows:  # listed first: what goes with the list is the earlier text of a name whose time was over
            self._try(partial(self._note, rows, now))
        for row in rows:
            if row.text:
                self._try(partial(self._put, self._prefix + row.name, row.text))

    def _try(self, write: Callable[[], bool]) -> None:
        """Write until nobody else did meanwhile; raises `StoreUnavailableError` if somebody always does."""
        if not any(write() for _ in range(TRIES)):
            raise outage(f"Airflow Variable {self._list!r}: others wrote it meanwhile, {TRIES} times")

    def _put(self, key: str, text: str) -> bool:
        return self._access.set(key, text, self._access.get(key))

    def _note(self, rows: Sequence[JobRow], now: float) -> bool:
        """List the rows beside those of others; return False if another write came in between."""
        before, text = self._listed()
        listed: Listed = {}
        for name, entry in before.items():
            if entry[2] > now:
                listed[name] = entry
            else:
                self._access.delete(self._prefix + name)
        for row in rows:
            until = now + row.keep_s
            if row.text:
                listed[row.name] = [row.whose, len(row.text), until]
            elif row.name in listed:
                listed[row.name] = [*listed[row.name][:2], until]
        if not self._access.set(self._list, json.dumps(listed), text):
            return False
        there, _ = self._listed()
        changed = [row.name for row in rows if listed.get(row.name) != before.get(row.name)]
        return all(there.get(name) != before.get(name) for name in changed)

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        listed, _ = self._listed()
        now = self._clock()
        found = {
            name: self._access.get(self._prefix + name)
            for name in names
            if name in listed and listed[name][2] > now
        }
        return {name: text for name, text in found.items() if text}

    def bytes_of(self, caller: str) -> int:
        listed, _ = self._listed()
        now = self._clock()
        return sum(size for whose, size, until in listed.values() if whose == digest(caller) and until > now)

    def _listed(self) -> tuple[Listed, str | None]:
        text = self._access.get(self._list)
        return (json.loads(text) if text else {}), text
