"""Silence of agents: which servers take no new leases because their agents have stopped to report."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from resource_manager.core.names import listed

logger = logging.getLogger(__name__)

MAX_NAMED = 8

SILENT_INTERVALS = 3
"""Number of an agent's own intervals without a report that it is given at least."""

MISSED_INTERVALS = 2
"""Number of its intervals after which an agent counts as one that may have fallen silent with others."""


@dataclass(frozen=True, slots=True)
class LastReport:
    """Time of a server's last report, -inf if unknown, and the time between two."""

    at: float
    interval_s: float


class SilenceWatch:
    """Decision of one observer which agents are lost; times are seconds of the store's clock.

    An agent is lost after `silent_after_s` without a report, or after `SILENT_INTERVALS` of its intervals if
    that is longer. The time counts only while the observer watches: from its first look, and again from the
    next one after a pause of more than half of `silent_after_s`, in which it may have missed reports, or
    after the clock was set back.

    If over half of the agents fall silent within `silent_after_s`, it was the service or the network: they
    are held, and not lost, until they report. Once half of them do, the others count from then.
    """

    def __init__(self, silent_after_s: float) -> None:
        self.silent_after_s = silent_after_s
        self._watching_since = 0.0
        self._looked_at = -math.inf
        self._held: dict[str, float] = {}
        """Time of the last report of each server that is held."""
        self._most_held = 0
        self._counted_from: dict[str, float] = {}
        """Time from which the silence of a server counts that a hold has ended for."""
        self._first_seen: dict[str, float] = {}
        """Time of the first look at each agent: the report that made a server watched may not be kept yet."""

    @property
    def servers_held(self) -> int:
        """The number of servers that fell silent together and have not reported since."""
        return len(self._held)

    def lost(self, agents: Mapping[str, LastReport], now: float) -> list[str]:
        """Return which of these agents, all that are not lost already, are lost now; call it regularly."""
        self._follow(agents, now)
        began = {
            name: max(
                agent.at if agent.at > -math.inf else self._first_seen[name],
                self._watching_since,
                self._counted_from.get(name, 0.0),
            )
            for name, agent in agents.items()
        }
        missing = [
            name for name, agent in agents.items() if now - began[name] > MISSED_INTERVALS * agent.interval_s
        ]
        found: list[str] = []
        for name in missing:
            limit_s = max(self.silent_after_s, SILENT_INTERVALS * agents[name].interval_s)
            if name in self._held or now - began[name] < limit_s:
                continue
            together = [other for other in missing if abs(began[other] - began[name]) <= self.silent_after_s]
            reporting = sum(agent.at > began[name] for agent in agents.values())
            if len(together) > reporting:
                self._hold({other: agents[other].at for other in together})
            else:
                found.append(name)
        return found

    def _follow(self, agents: Mapping[str, LastReport], now: float) -> None:
        """Begin again after a pause, and take note of agents that report again."""
        if not 0 <= now - self._looked_at <= self.silent_after_s / 2:
            self._watching_since = now
            self._first_seen.clear()
        if now < self._looked_at:  # what is known is of times to come
            self._held = dict.fromkeys(self._held, -math.inf)
            self._counted_from.clear()
        self._looked_at = now
        self._first_seen = {name: self._first_seen.get(name, now) for name in agents}
        self._held = _still_silent(self._held, agents)
        if self._most_held and 2 * len(self._held) <= self._most_held:
            logger.warning(
                "of %d servers that fell silent together, %d report again%s",
                self._most_held,
                self._most_held - len(self._held),
                f"; still silent: {listed(sorted(self._held), MAX_NAMED)}" if self._held else "",
            )
            self._counted_from.update(dict.fromkeys(self._held, now))
            self._held.clear()
            self._most_held = 0
        self._counted_from = _still_silent(self._counted_from, agents)

    def _hold(self, together: Mapping[str, float]) -> None:
        is_new = not self._held
        self._held.update(together)
        self._most_held = max(self._most_held, len(self._held))
        if is_new:
            logger.warning(
                "over half of the watched servers fell silent together (%s): this service or the network is "
                "the likely cause, so none of them is closed",
                listed(sorted(self._held), MAX_NAMED),
            )


def _still_silent(since: Mapping[str, float], agents: Mapping[str, LastReport]) -> dict[str, float]:
    """Return the servers that have not reported since these times."""
    return {name: at for name, at in since.items() if name in agents and agents[name].at <= at}
