"""First in, first out: gangs of a fixed size start in order of arrival and run to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from simulator.oasis.baselines.gang import Gang, draw_gang, keep, spread
from simulator.oasis.ledger import Ledger
from simulator.oasis.model import TrainingJob
from simulator.oasis.planner import Share, allocate_shares


class Fifo:
    """The default of Hadoop and Spark as the paper describes it: the first job blocks those behind it."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger = ledger
        self.rng = np.random.default_rng([seed, 2])
        self.pending: deque[Gang] = deque()
        self.running: dict[str, tuple[Gang, tuple[Share, ...]]] = {}

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        gang = draw_gang(job, self.rng, self.ledger)
        if gang is not None:
            self.pending.append(gang)
        return gang is not None

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        self.running = {job_id: held for job_id, held in self.running.items() if job_id in remaining}
        for gang, shares in self.running.values():
            keep(self.ledger, slot, gang, shares)
        while self.pending:
            found = spread(self.ledger, slot, self.pending[0])
            if found is None:
                break
            gang = self.pending.popleft()
            allocate_shares(self.ledger, gang.job, found)
            self.running[gang.job.job_id] = (gang, found)
