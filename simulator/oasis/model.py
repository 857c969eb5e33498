"""Jobs, servers and problem instances of OASiS, in slots and in the units of the instance file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simulator.errors import InputError

RESOURCES = ("gpu", "cpu", "memory", "storage", "bandwidth")
"""Order of every amount vector: GPUs, CPUs, GB, GB, Gb/s."""

GPU = RESOURCES.index("gpu")
BANDWIDTH = RESOURCES.index("bandwidth")

Amounts = tuple[float, ...]
"""One amount per resource, in the order of `RESOURCES`."""

Units = tuple[int, ...]
"""The same in whole units, so that sums are exact: GPUs, and millionths of every other resource."""

UNITS = (1, 10**6, 10**6, 10**6, 10**6)

MAX_COUNT = 10_000
"""Largest count of jobs, slots, servers of a role or chunks of a job: more would exhaust the memory."""

MAX_AMOUNT = 1e9
"""Limit of an amount, so that amounts in `Units` are exact as floats."""

ROUNDING = 1e-9
"""Products of floats that miss a whole number by less than this count as that number."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training job on workers and parameter servers (PS); a comment gives the paper's symbol of each field.

    Times are in slots. `gradient` is in Gb/s x slots (gigabits divided by the seconds of a slot), so that
    gradient / bandwidth is in slots. Raises `InputError` for amounts with which it cannot run.
    """

    job_id: str
    arrival: int  # a
    chunks: int  # N, the maximum number of workers at a time
    minibatches: int  # M, a chunk
    epochs: int  # E
    minibatch_slots: float  # tau
    gradient: float  # e
    worker: Amounts  # w
    ps: Amounts  # s
    priority: float  # gamma 1
    sensitivity: float  # gamma 2
    target: float  # gamma 3
    worker_units: Units = field(init=False, repr=False)
    ps_units: Units = field(init=False, repr=False)
    slots_a_chunk: float = field(init=False, repr=False)
    """E M rho, slots of one worker for its chunk over all epochs."""
    work: int = field(init=False)
    """W, worker-slots."""
    shortest_duration: int = field(init=False)
    """d, slots with a worker on every chunk."""
    ps_for: tuple[int, ...] = field(init=False, repr=False)
    """The fewest PS with enough bandwidth for y workers, by y from 0 to `chunks`."""

    def __post_init__(self) -> None:
        for is_wrong, reason in (
            (
                not any(to_units(self.worker)),
                "a worker must request a resource; w is all zeros, to a millionth",
            ),
            (not self.minibatch_slots + self.gradient, "tau and e are both 0: there is no work to do"),
            (
                self.gradient and not self.worker[BANDWIDTH],
                "w.bandwidth must be above 0 where a gradient e is sent",
            ),
            (
                self.worker[BANDWIDTH] > self.ps[BANDWIDTH],
                f"s.bandwidth {self.ps[BANDWIDTH]:g} is below w.bandwidth {self.worker[BANDWIDTH]:g}: "
                "one PS per worker could not serve the workers",
            ),
        ):
            if is_wrong:
                raise InputError(f"job {self.job_id!r}: {reason}")
        object.__setattr__(self, "worker_units", to_units(self.worker))
        object.__setattr__(self, "ps_units", to_units(self.ps))
        exchange = 2 * self.gradient / self.worker[BANDWIDTH] if self.gradient else 0.0
        slots_a_chunk = self.epochs * self.minibatches * (self.minibatch_slots + exchange)
        object.__setattr__(self, "slots_a_chunk", slots_a_chunk)
        object.__setattr__(self, "work", max(1, ceil(self.chunks * slots_a_chunk)))
        object.__setattr__(self, "shortest_duration", max(1, ceil(slots_a_chunk)))
        sent, taken = self.worker_units[BANDWIDTH], max(1, self.ps_units[BANDWIDTH])
        object.__setattr__(self, "ps_for", tuple(-(-sent * y // taken) for y in range(self.chunks + 1)))

    def utility(self, duration: float) -> float:
        """Return the utility of finishing within that many slots: a sigmoid around the target (section V)."""
        exponent = self.sensitivity * (duration - self.target)
        if exponent > 0:
            shrunk = math.exp(-exponent)
            return self.priority * shrunk / (1 + shrunk)
        return self.priority / (1 + math.exp(exponent))

    def utility_at(self, slot: int) -> float:
        """Return the utility of finishing in that slot."""
        return self.utility(slot - self.arrival + 1)


def to_units(amounts: Amounts) -> Units:
    """Return the amounts in whole units."""
    return tuple(round(amount * unit) for amount, unit in zip(amounts, UNITS, strict=True))


def ceil(value: float) -> int:
    """Return the value rounded up, tolerating floating-point error."""
    return math.ceil(value - ROUNDING * max(1.0, abs(value)))


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem: slots 0 to `slots` - 1, the capacities of each worker and PS server, the jobs."""

    slots: int
    worker_servers: tuple[Amounts, ...]
    ps_servers: tuple[Amounts, ...]
    jobs: tuple[TrainingJob, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for job in self.jobs:
            if job.job_id in seen:
                raise InputError(f"job id {job.job_id!r} is used twice")
            seen.add(job.job_id)

    def load(self) -> float:
        """Return the jobs' demand for the most demanded worker resource, as a fraction of all its slots."""
        return max(
            (
                sum(job.work * job.worker[r] for job in self.jobs) / (self.slots * capacity)
                for r in range(len(RESOURCES))
                if (capacity := sum(server[r] for server in self.worker_servers)) > 0
            ),
            default=0.0,
        )
