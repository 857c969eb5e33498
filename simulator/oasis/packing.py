"""Packing: how many workers (or PS) of several jobs fit together on the servers of one type."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.oasis.ledger import max_multiple
from simulator.oasis.milp import Maximisation
from simulator.oasis.model import RESOURCES, Amounts, Units, to_units

MAX_PARTS = 8
"""Rounding rows are tried for a server cut into 1 to this many parts."""


SLACK = 1e-6
"""Rounding error by which a server content may weigh more than 1; the weights are finally divided by it."""


@dataclass(frozen=True, slots=True)
class ServerType:
    """Servers of equal capacity, in units, by their positions in the pool."""

    capacity: Units
    servers: tuple[int, ...]


def server_types(servers: Sequence[Amounts]) -> tuple[ServerType, ...]:
    """Return the servers grouped by capacity, in order of first appearance."""
    by_capacity: dict[Units, list[int]] = {}
    for index, capacity in enumerate(servers):
        by_capacity.setdefault(to_units(capacity), []).append(index)
    return tuple(ServerType(capacity, tuple(found)) for capacity, found in by_capacity.items())


def max_count_on(kind: ServerType, demand: Units) -> int:
    """Return how many of that demand fit on all servers of the type when nothing else runs."""
    return len(kind.servers) * int(max_multiple(np.array(kind.capacity, dtype=float), demand))


def capacity_rows(kind: ServerType, demands: Sequence[Units]) -> list[list[float]]:
    """Return coefficients by demand of rows `sum coefficient x count <= number of servers`, for one slot.

    Besides each resource's fraction of a server, rows round fractions to parts of a server, which holds
    server by server and so in sum (dual feasible functions u^(k), Fekete and Schepers 2001): three GPUs
    of eight count as half a server, because no third such worker fits. Rows implied by another are left out.
    """
    rows: list[list[float]] = []
    for r in range(len(RESOURCES)):
        if not any(demand[r] for demand in demands):
            continue
        shares = [demand[r] / kind.capacity[r] if kind.capacity[r] else math.inf for demand in demands]
        # A demand that does not fit on a server at all is excluded by its column's upper bound.
        shares = [share if share <= 1 else 0.0 for share in shares]
        rows.append(shares)
        rows += ([rounded_share(share, parts) for share in shares] for parts in range(1, MAX_PARTS + 1))
    return [
        row
        for index, row in enumerate(rows)
        if any(row)
        and not any(
            all(a >= b for a, b in zip(other, row, strict=True)) and (other != row or before < index)
            for before, other in enumerate(rows)
            if before != index
        )
    ]


def rounded_share(share: float, parts: int) -> float:
    """Return u^(parts) of Fekete and Schepers: fractions that are not whole multiples of 1 / (parts + 1)
    round down to whole multiples of 1 / parts."""
    scaled = share * (parts + 1)
    if abs(scaled - round(scaled)) < 1e-9:
        return share
    return math.floor(scaled) / parts


def pack(
    kind: ServerType, counts: Sequence[int], demands: Sequence[Units], time_limit_s: float
) -> list[Counter[int]] | None:
    """Return servers of the type for the counts: server -> count, by demand; None if not found."""
    packed = pack_greedily(kind, counts, demands)
    return pack_exactly(kind, counts, demands, time_limit_s) if packed is None else packed


def pack_greedily(
    kind: ServerType, counts: Sequence[int], demands: Sequence[Units]
) -> list[Counter[int]] | None:
    """Pack by first fit, the largest fraction of a server first."""
    capacity = np.array(kind.capacity, dtype=float)
    free = np.repeat(capacity[np.newaxis], len(kind.servers), axis=0)
    packed: list[Counter[int]] = [Counter() for _ in counts]

    def size(index: int) -> float:
        return max(
            (amount / total if total else math.inf)
            for amount, total in zip(demands[index], kind.capacity, strict=True)
            if amount
        )

    order = sorted((index for index, count in enumerate(counts) if count), key=size, reverse=True)
    for index in order:
        left = counts[index]
        fit = max_multiple(free, demands[index])
        for position, server in enumerate(kind.servers):
            taken = min(left, int(fit[position]))
            if taken:
                packed[index][server] = taken
                free[position] -= taken * np.array(demands[index])
                left -= taken
        if left:
            return None
    return packed


def pack_exactly(
    kind: ServerType, counts: Sequence[int], demands: Sequence[Units], time_limit_s: float
) -> list[Counter[int]] | None:
    """Return a feasible assignment by HiGHS; None if there is none or the time was too short."""
    model = Maximisation()
    columns = {
        (index, server): model.add(count)
        for index, count in enumerate(counts)
        if count
        for server in kind.servers
    }
    for index, count in enumerate(counts):
        if count:
            model.constrain(
                {columns[index, server]: 1.0 for server in kind.servers}, at_least=count, at_most=count
            )
    for server in kind.servers:
        for r, total in enumerate(kind.capacity):
            terms = {
                column: demands[index][r]
                for (index, where), column in columns.items()
                if where == server and demands[index][r]
            }
            if terms:
                model.constrain(terms, at_most=total)
    solution = model.solve(time_limit_s)
    if not solution.values:
        return None
    packed: list[Counter[int]] = [Counter() for _ in counts]
    for (index, server), column in columns.items():
        if solution.whole(column):
            packed[index][server] = solution.whole(column)
    return packed


def overfull_weights(
    kind: ServerType, counts: Sequence[float], demands: Sequence[Units], deadline: float
) -> list[float] | None:
    """Return weights by demand under which no server holds more than 1, but the counts exceed all servers.

    These are the dual prices of the cutting-stock programme (Gilmore and Gomory 1961), found by adding one
    violated server content at a time. Return None if there are no such weights or the time is over: then the
    counts may still not pack, but no linear row excludes them.
    """
    present = [index for index, count in enumerate(counts) if count]
    single = [int(max_multiple(np.array(kind.capacity, dtype=float), demands[index])) for index in present]
    if not all(single):
        return None
    dual = Maximisation()
    for index, most in zip(present, single, strict=True):
        dual.constrain({dual.add(1.0, counts[index], integer=False): float(most)}, at_most=1.0)
    while (left_s := deadline - time.monotonic()) > 0:
        found = dual.solve(left_s)
        if not found.values or found.objective <= len(kind.servers) * (1 + SLACK):
            return None
        heaviest = Maximisation()
        for weight, most in zip(found.values, single, strict=True):
            heaviest.add(most, weight)
        for r, total in enumerate(kind.capacity):
            terms = {
                column: demands[index][r] / total for column, index in enumerate(present) if demands[index][r]
            }
            if terms:
                heaviest.constrain(terms, at_most=1.0)
        content = heaviest.solve(deadline - time.monotonic())
        if not content.values:
            return None
        if content.bound <= 1 + SLACK:
            weights = [0.0] * len(counts)
            for column, index in enumerate(present):
                weights[index] = found.values[column] / max(1.0, content.bound)
            return weights
        dual.constrain(
            {column: float(content.whole(column)) for column in range(len(present)) if content.whole(column)},
            at_most=1.0,
        )
    return None
