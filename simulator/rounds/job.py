"""A training job as round policies read it, and what a replay records about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(slots=True)
class Span:
    """Time in seconds in which a job had the same GPUs; `servers` has one entry for each GPU."""

    begin: float
    end: float
    servers: tuple[str, ...]
    gpus: float


@dataclass(slots=True, eq=False)
class Job(ABC):
    """A job, its GPUs now and what happened to it; times are seconds.

    `gpus` is the number asked for. `servers` and `allocated` are what it has now: one entry for each GPU, in
    the order of the allocation, and their number, which may be a fraction of one. `lost_gpu_s` is the GPU
    time spent on restarts. A trace adds how the job makes progress.
    """

    name: str
    arrival_s: float
    gpus: float
    servers: tuple[str, ...] = ()
    allocated: float = 0
    ended_at: float | None = None
    cancelled_at: float | None = None
    preemptions: int = 0
    lost_gpu_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @property
    @abstractmethod
    def steps_left(self) -> float:
        """Steps to the end of the job."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """Steps a second on the GPUs that the job asks for."""

    @property
    @abstractmethod
    def max_gpus(self) -> int:
        """Largest number of GPUs on which the job can run."""

    @property
    @abstractmethod
    def exclusive_s(self) -> float:
        """Seconds that the job would take alone on the GPUs it asks for."""

    @abstractmethod
    def step_s(self, gpus: int) -> float:
        """Return the seconds of one step on that number of GPUs."""

    @property
    def started_at(self) -> float | None:
        """Time at which the job first had GPUs; None before."""
        return self.spans[0].begin if self.spans else None

    @property
    def jct_s(self) -> float | None:
        """Completion time, from arrival to end; None before the end."""
        return None if self.ended_at is None else self.ended_at - self.arrival_s

    def record_span(self, begin: float, end: float) -> None:
        """Record that the job had its GPUs from `begin` to `end`."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last.end == begin and last.servers == self.servers:
            last.end = end
        else:
            self.spans.append(Span(begin, end, self.servers, self.allocated))


class RunningJob(Job):
    """A job that makes progress by itself, second by second."""

    __slots__ = ()

    @abstractmethod
    def advance(self, seconds: int) -> int | float | None:
        """Make progress on the job's GPUs; return after how many of the seconds it ended, if it did."""
