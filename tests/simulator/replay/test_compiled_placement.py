"""The compiled placement of a trace equals that of the policies, which are its specification."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resource_manager.core.models import Gpu, Node, Placement, Request
from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from simulator.replay.compiled_placement import POLICIES, CompiledPolicy
from simulator.replay.openb import Trace, place, policy_for

MODELS = ("T4", "G2", "A10")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to six nodes, one perhaps without a GPU, and up to fifty arrivals of up to twelve pods."""
    nodes = tuple(
        Node(
            f"n{index}",
            index,
            {"cpu_milli": draw(st.sampled_from((4000, 8000))), "memory_mib": draw(st.integers(1, 9))},
            tuple(Gpu(gpu, model) for gpu in range(draw(st.sampled_from((0, 1, 2, 4, 8))))),
        )
        for index, model in enumerate(draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=6)))
    )
    pods = tuple(_pod(draw, index) for index in range(draw(st.integers(1, 12))))
    rows = draw(st.lists(st.sampled_from(pods), min_size=1, max_size=50))
    return Trace(nodes, pods, tuple(pod.for_task(f"{pod.lease_id}#{at}") for at, pod in enumerate(rows)))


def _pod(draw: st.DrawFn, index: int) -> Request:
    gpus = draw(st.sampled_from((0, 1, 1, 1, 2, 4, 8)))
    milli = draw(st.sampled_from((1000, 1000, 250, 500, 700))) if gpus == 1 else 1000
    resources = {
        "cpu_milli": draw(st.sampled_from((0, 500, 1000, 3000))),
        "memory_mib": draw(st.integers(0, 2)),
    }
    types = draw(st.sampled_from(((), (), ("T4",), ("G2", "A10"), ("H100",))))
    return Request(f"p{index}", gpus, milli, resources, types)


def placements(trace: Trace, policy: object) -> dict[str, Placement]:
    leases = place(trace, policy).cluster.leases  # type: ignore[arg-type]
    return {lease_id: lease.placement for lease_id, lease in leases.items()}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=traces(), seed=st.integers(0, 2**32))
def test_compiled_and_plain_policies_place_alike(name: str, trace: Trace, seed: int) -> None:
    fragmentation = Fragmentation.of(trace.pods, "cpu_milli")
    plain = placements(trace, policy_for(name, fragmentation, seed))
    assert placements(trace, CompiledPolicy(trace.nodes, trace.arrivals, name, fragmentation, seed)) == plain
