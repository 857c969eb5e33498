"""A cluster shared by teams, with preemption on, for tests of who takes what from whom."""

from __future__ import annotations

from resource_manager.core.changes import Change, Outcome, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.teams import Team, Teams
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import QueueDiscipline, fifo, get_order
from resource_manager.scheduling.reasons.feasibility import standings
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import nodes

GREEDY = get_order("fifo+backfill")
"""With stated runtimes that delay nobody, an order in which everything starts that fits."""


class Shared:
    """Cluster of servers shared by teams, with every change since its start."""

    def __init__(
        self,
        *teams: Team,
        letters: str = "a",
        gpus: int = 4,
        delay_s: float = 0.0,
        min_runtime_s: float = 0.0,
        order: QueueDiscipline = fifo,
    ) -> None:
        self.state = ClusterState(nodes(letters, gpus, 64))
        self.order = order
        self.now = 1000.0
        self.changes: list[Change] = []
        self.do([TeamsChanged(Teams(teams, True, min_runtime_s, delay_s), 0.0)])

    @property
    def current(self) -> SchedulingPass:
        return SchedulingPass(first_fit, self.order, self.now)

    def do(self, changes: list[Change]) -> list[Change]:
        for change in changes:
            self.state.apply(change)
        self.changes += changes
        allocator.check(self.state)
        return changes

    def submit(self, lease_id: str, gpus: int = 1, team: str = "", **more: object) -> list[Change]:
        request = Request(lease_id, gpus, team=team, resources={"cpus": 1}, **more)  # type: ignore[arg-type]
        self.now += 1.0
        return self.do(allocator.submit(self.state, request, self.current))

    def tick(self, seconds: float = 1.0) -> list[Change]:
        self.now += seconds
        due = lease_steps.expire(self.state, self.now)
        return self.do(allocator.with_dispatch(self.state, due, self.current))

    def release(self, lease_id: str, outcome: str = Outcome.PREEMPTED) -> list[Change]:
        self.now += 1.0
        ended = lease_steps.release(self.state, lease_id, self.now, outcome=outcome)
        return self.do(allocator.with_dispatch(self.state, ended, self.current))

    def preempting(self) -> dict[str, str]:
        return {name: self.state.leases[name].preempted_by for name in self.state.preempting}

    def refusal(self, lease_id: str) -> tuple[str, str]:
        (standing,) = standings(self.state, self.current, only=[lease_id])
        return str(standing.refusal.kind), detail_of(standing.refusal)
