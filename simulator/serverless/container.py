"""Container: the run of one function on a NUMA node."""

from __future__ import annotations

import math
from functools import lru_cache

from resource_manager.core.models import Request


class Container:
    """Run of a function: MiB required and allocated, operations, threads, and its times in seconds.

    `share` is min(allocated, required) x threads; the speed of the container is floor(share x thread
    speed / required). `remaining_computation` is exact as of the node's last event; `completion_time` is
    infinite until the container has ended.
    """

    __slots__ = (
        "completion_time",
        "computation",
        "creation_time",
        "data_transfer_time",
        "fencing_token",
        "fn_id",
        "memory_alloc",
        "memory_req",
        "parallelism",
        "remaining_computation",
        "request",
        "share",
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
        self.share = (memory_alloc if memory_alloc < memory_req else memory_req) * parallelism
        self.request = _memory(memory_alloc).for_task(f"{wf_id}/{fn_id}")
        self.fencing_token = 0
        self.creation_time = math.inf
        self.start_time = math.inf
        self.completion_time = math.inf

    def speed(self, thread_speed: int) -> int:
        """Return the operations per second if one thread gets `thread_speed`."""
        return self.share * thread_speed // self.memory_req


@lru_cache
def _memory(amount_mib: int) -> Request:
    """Return the request that all containers with this amount of memory copy."""
    return Request("container", resources={"memory_mib": amount_mib})
