"""Container: the run of one function on a NUMA node."""

from __future__ import annotations

from math import gcd, inf

from simulator.serverless.workflow import Function


class Container:
    """Run of a `function`: MiB allocated, operations, threads, and the times (s) before its start.

    `rate` is min(allocated, required) x threads / required as a reduced fraction: the speed of the container
    is floor(rate x thread speed). `remaining_computation` is exact as of the node's last event.
    """

    __slots__ = (
        "computation",
        "creation_time",
        "data_transfer_time",
        "function",
        "memory_alloc",
        "parallelism",
        "rate",
        "remaining_computation",
    )

    def __init__(self, function: Function, memory_alloc: int, data_transfer_time: float = 0.0) -> None:
        self.function = function
        self.memory_alloc = memory_alloc
        self.computation = self.remaining_computation = function.computation
        self.parallelism = parallelism = function.parallelism
        self.data_transfer_time = data_transfer_time
        memory_req = function.memory_req
        if memory_alloc < memory_req:
            share = memory_alloc * parallelism
            common = gcd(share, memory_req)
            self.rate = share // common, memory_req // common
        else:
            self.rate = parallelism, 1
        self.creation_time = inf

    @property
    def wf_id(self) -> int:
        return self.function.wf_id

    @property
    def fn_id(self) -> int:
        return self.function.fn_id

    def speed(self, thread_speed: int) -> int:
        """Return the operations per second if one thread gets `thread_speed`."""
        numerator, denominator = self.rate
        return numerator * thread_speed // denominator
