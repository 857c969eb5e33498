"""Jobs of requests and their results in Airflow Variables, one each: Airflow encrypts and masks them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import digest

if TYPE_CHECKING:
    from resource_manager.storage.airflow_variable.access import VariableAccess


class VariableJobs:
    """`JobStore` beside the state in a Variable; it is written under the lock of that.

    A Variable `<variable>_jobs` lists the others: of each, whose it is, its size and its end. `secret` in
    their names has Airflow mask them.
    """

    def __init__(self, access: VariableAccess, variable: str, clock: Callable[[], float]) -> None:
        self._access = access
        self._prefix = f"{variable}_secret_job_"
        self._list = f"{variable}_jobs"
        self._clock = clock

    def write(self, rows: Sequence[JobRow]) -> None:
        """Store the rows of a commit, and drop what has reached its end."""
        if not rows:
            return
        listed, text = self._listed()
        now = self._clock()
        for name in [name for name, (_, _, until) in listed.items() if until <= now]:
            self._access.delete(self._prefix + name)
            del listed[name]
        for row in rows:
            key, until = self._prefix + row.name, now + row.keep_s
            if row.text:
                self._access.set(key, row.text, self._access.get(key))
                listed[row.name] = [digest(row.caller), len(row.text), until]
            elif row.name in listed:
                listed[row.name][2] = until
        self._access.set(self._list, json.dumps(listed), text)

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

    def _listed(self) -> tuple[dict[str, list[Any]], str | None]:
        text = self._access.get(self._list)
        return (json.loads(text) if text else {}), text
