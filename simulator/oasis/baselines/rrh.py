"""Risk-reward heuristic: a job is accepted if it gains more than the delay of the others costs.

After Irwin, Grit, Chase, Balancing Risk and Reward in a Market-based Task Service, HPDC 2004. There a task's
value falls linearly; here the loss of a delay is read off each pending job's own utility function.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulator.oasis.baselines.gang import Gang, draw_gang, keep, spread
from simulator.oasis.ledger import Ledger
from simulator.oasis.model import TrainingJob
from simulator.oasis.planner import Share, allocate_shares


class Rrh:
    """Gangs of a fixed size, accepted and started by gain minus opportunity cost, run to their end."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger = ledger
        self.rng = np.random.default_rng([seed, 2])
        self.pending: list[Gang] = []
        self.running: dict[str, tuple[Gang, tuple[Share, ...], int]] = {}

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        gang = draw_gang(job, self.rng, self.ledger)
        if gang is None or self.reward(gang, self.expected_start(gang, slot), slot) <= 0:
            return False
        self.pending.append(gang)
        return True

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        self.running = {job_id: held for job_id, held in self.running.items() if job_id in remaining}
        for gang, shares, _ in self.running.values():
            keep(self.ledger, slot, gang, shares)
        # By reward per unit of capacity and time, the best first; a gang that does not fit blocks no other.
        for gang in sorted(
            self.pending,
            key=lambda gang: -self.reward(gang, slot, slot) / (self.size(gang) * gang.slots),
        ):
            found = spread(self.ledger, slot, gang)
            if found is not None:
                allocate_shares(self.ledger, gang.job, found)
                self.running[gang.job.job_id] = (gang, found, slot + gang.slots)
                self.pending.remove(gang)

    def reward(self, gang: Gang, start: int, now: int) -> float:
        """Return the gain of running from `start` on, minus what pending jobs would lose if it went first."""
        end = start + gang.slots - 1
        gain = gang.job.utility_at(end) if end < self.ledger.slots else 0.0
        delay = self.size(gang) * gang.slots
        return gain - sum(
            loss_of_delay(other, now, delay, self.ledger.slots) for other in self.pending if other is not gang
        )

    def expected_start(self, gang: Gang, slot: int) -> int:
        """Return the slot in which the work ahead, running or pending, would be done if spread evenly."""
        ahead = sum(self.size(held) * max(0, end - slot) for held, _, end in self.running.values())
        ahead += sum(self.size(held) * held.slots for held in self.pending)
        used = sum(self.size(held) for held, _, _ in self.running.values())
        if not self.pending and used + self.size(gang) <= 1:
            return slot
        return slot + round(ahead)

    def size(self, gang: Gang) -> float:
        """Return the fraction of the cluster that the gang takes."""
        job = gang.job
        return max(
            gang.workers / self.ledger.worker.fit_when_empty(job),
            job.ps_for[gang.workers] / max(1, self.ledger.ps.fit_when_empty(job)),
        )


def loss_of_delay(gang: Gang, start: int, delay: float, slots: int) -> float:
    """Return the utility that the gang loses when it starts so many slots after `start`."""
    end = start + gang.slots - 1
    if end >= slots:
        return 0.0
    late = gang.job.utility(end + delay - gang.job.arrival + 1) if end + delay < slots else 0.0
    return gang.job.utility_at(end) - late
