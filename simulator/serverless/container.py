"""Container: the run of one function on a NUMA node."""

from __future__ import annotations

from math import gcd, inf


class Container:
    """Run of a function: MiB required and allocated, operations, threads, and its times in seconds.

    `rate` is min(allocated, required) x threads / required as a reduced fraction: the speed of the container
    is floor(rate x thread speed). `remaining_computation` is exact as of the node's last event;
    `completion_time` is infinite until the container has ended.
    """

    __slots__ = (
        "completion_time",
        "computation",
        "creation_time",
        "data_transfer_time",
        "fn_id",
        "memory_alloc",
        "memory_req",
        "parallelism",
        "rate",
        "remaining_computation",
        "start_time",
        "submission_time",
        "wf_id",
    )

    def __init__(
        self,
        wf_id: int,
        fn_id: int,
        memory_req: int,
        memory_alloc: int,
        computation: int,
        parallelism: int,
        submission_time: float,
        data_transfer_time: float = 0.0,
    ) -> None:
        self.wf_id = wf_id
        self.fn_id = fn_id
        self.memory_req = memory_req
        self.memory_alloc = memory_alloc
        self.computation = computation
        self.parallelism = parallelism
        self.submission_time = submission_time
        self.data_transfer_time = data_transfer_time
        self.remaining_computation = computation
        if memory_alloc < memory_req:
            share = memory_alloc * parallelism
            common = gcd(share, memory_req)
            self.rate = share // common, memory_req // common
        else:
            self.rate = parallelism, 1
        self.creation_time = inf
        self.start_time = inf
        self.completion_time = inf

    def speed(self, thread_speed: int) -> int:
        """Return the operations per second if one thread gets `thread_speed`."""
        numerator, denominator = self.rate
        return numerator * thread_speed // denominator
