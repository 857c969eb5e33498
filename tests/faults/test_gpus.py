"""GPUs that fail, move and stay in use: seeded courses on each store, and bugs that the checker must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resource_manager import MemoryStore
from resource_manager.core import gpu_state, leased_nodes
from resource_manager.core.changes import AgentSeen, Change, GpuClosed, Granted, InventoryChanged, Released
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.errors import CapacityError
from resource_manager.fleet import judgement, lease_use, transitions
from resource_manager.fleet.records import Record
from resource_manager.manager import cluster_change
from resource_manager.storage import open_store
from tests.builders import Clock
from tests.faults.gpu_checks import Seen, check_gpus
from tests.faults.gpus import SETTING, Course
from tests.faults.run import run_seed
from tests.faults.setups import setting_of
from tests.redis_server import RedisServer


def in_memory(seed: int) -> Course:
    clock = Clock()
    clock.now = 1e6
    store = MemoryStore(clock=clock)

    def pass_time(seconds: float) -> None:
        clock.now += seconds

    return Course(seed, [store, store], pass_time)


@pytest.mark.parametrize("seed", range(8))
def test_a_course_of_faults_grants_no_gpu_that_is_closed_gone_or_in_use(seed: int) -> None:
    course = in_memory(seed)
    assert course.run(250) == []
    kinds = [entry["change"] for entry in course.managers[0].history(limit=10_000)]
    for kind in ("granted", "gpuclosed", "gpuopened", "gpucleaned", "agentlost"):
        assert kinds.count(kind) > 2, f"{kind}: a course without it proves little"
    assert course.refused > 2


@pytest.mark.parametrize("seed", range(2))
def test_the_same_on_redis_with_two_clients(seed: int, embedded_redis: RedisServer) -> None:
    url = embedded_redis.fresh_url()
    course = Course(seed, [open_store(url), open_store(url)])
    assert course.run(120) == []
    fresh = open_store(url).refresh(None)
    kept = course.managers[0].store.refresh(None)
    assert fresh is not None
    assert kept is not None
    assert fresh.snapshot() == kept.snapshot()


@pytest.mark.slow
def test_a_seed_of_the_matrix_has_failing_gpus() -> None:
    outcome = run_seed(5)
    assert (outcome.setting, outcome.complaints) == (SETTING, [])
    assert outcome.granted > 5
    assert min(outcome.faults.values()) > 2
    assert setting_of(15) == SETTING


def unused(state: NodeState, gpu_ids: object) -> None:
    closed, state.closed_gpus = state.closed_gpus, {}
    recount(state, tuple(state.gpu_free))
    state.closed_gpus = closed


recount, fault = gpu_state.recount, transitions._Reading._fault
Planted = tuple[object, str, Callable[..., object]]
NO_ROGUES: Planted = (transitions, "rogue_processes", lambda state, gpu_id, gpu: [])

BUGS: dict[str, list[Planted]] = {
    "forgets to clean": [
        (leased_nodes, "begin_cleaning", lambda state, lease, member, at: lambda: None),
        NO_ROGUES,
    ],
    "frees closed GPUs": [(gpu_state, "recount", unused)],
    "overlooks missing devices": [
        (
            transitions._Reading,
            "_fault",
            lambda self, gpu_id, gpu: (None, False) if gpu is None or gpu.lost else fault(self, gpu_id, gpu),
        )
    ],
    "takes everything as clean": [(transitions._Reading, "_left_of", lambda self, entry: []), NO_ROGUES],
    "forgets closures that move": [
        (cluster_change, "replacement", lambda cluster, nodes, now, lines: [InventoryChanged(nodes, now)])
    ],
    "goes by numbers": [(NodeState, "gpu_ids_of", lambda self, placement: placement.gpu_ids)],
    "takes everything as idle": [(lease_use, "_is_idle", lambda gpu, lease, below: True)],
    "takes silence as idle": [(Record, "tells_of", lambda self, now: True)],
    "releases nothing as idle": [(judgement, "idle_releases", lambda cluster, uses, now, node: [])],
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_checker_finds_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, planted in BUGS[bug]:
        monkeypatch.setattr(owner, name, planted)
    assert any(is_found(seed) for seed in range(8))


def is_found(seed: int) -> bool:
    """Return True if the checker complains, or the fold itself refuses a grant as impossible."""
    try:
        return bool(in_memory(seed).run(250))
    except CapacityError:
        return True


def lease(token: int, gpu_id: int) -> Granted:
    placed = Placement("s0", (gpu_id,), (f"u{gpu_id}",))
    return Granted(Lease(Request(f"t{token}", 1), (placed,), token, 0.0), 0.0)


def test_what_the_checker_complains_of() -> None:
    history: list[tuple[int, Change]] = [
        (1, AgentSeen("s0", 0.0)),
        (2, lease(1, 0)),
        (3, Released("t1", 1, 1.0)),
        (4, lease(2, 0)),
        (5, GpuClosed("s0", 1, "u1", "xid 79", 2.0)),
        (6, lease(3, 1)),
        (7, lease(4, 2)),
        (8, lease(5, 0)),
    ]
    seen = [Seen(1, "s0", {"u0": set(), "u1": set()}), Seen(3, "s0", {"u0": {1}, "u1": set()})]
    assert check_gpus(history, seen) == [
        "version 4: t2 got GPU 0 of s0, on which the job of lease {1} was left",
        "version 6: t3 got GPU 1 of s0, which is closed",
        "version 7: t4 got GPU 2 of s0, which was not there",
        "version 8: t5 got GPU 0 of s0, which is held already",
        "version 8: t5 got GPU 0 of s0, on which the job of lease {1} was left",
    ]
