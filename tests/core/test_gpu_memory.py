"""GPU memory as a demand: what counts as how much, refusals of other texts, and shares of one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager import GPUResourceManager
from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_memory import as_gpu_memory, has_memory, nominal_gb
from resource_manager.core.models import Gpu, Lease, Node, Request, TypeChoice
from resource_manager.errors import InvalidRequestError
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.gangs import select_members
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass

A10G = Gpu(0, "A10G", "nvidia", 22_731)
A100 = Gpu(0, "A100-SXM4-40GB", "nvidia", 40_960)
MIG = Gpu(0, "A100-SXM4-40GB:1g.5gb", "nvidia", 4_864, "MIG-1")


@pytest.mark.parametrize(
    ("gpu", "gpu_memory", "fits"),
    [
        (A10G, "24GB", True),  # as its data sheet says
        (A10G, "24GiB", False),  # as its driver says
        (A10G, "22GiB", True),
        (A100, "40GB", True),
        (A100, "40GiB", True),
        (A100, "43GB", False),
        (MIG, "5GB", True),
        (MIG, "6GB", False),
        (Gpu(0, "NVIDIA A10G", "nvidia", 22_731), "24GB", True),
        (Gpu(0, "T4"), "16GB", True),  # nothing but the type is known
        (Gpu(0, "X"), "1GB", False),
        (Gpu(0, "T4"), "1GiB", False),
    ],
)
def test_a_gpu_counts_as_its_vendor_calls_it_in_gb_and_as_reported_in_gib(
    gpu: Gpu, gpu_memory: str, fits: bool
) -> None:
    assert has_memory(gpu, gpu_memory) == fits


def test_texts_are_stored_in_one_form() -> None:
    assert [as_gpu_memory(text) for text in ("40GB", " 40.0 GB", "22.50GiB")] == ["40GB", "40GB", "22.5GiB"]
    for text in ("0.000001GB", "1048575.123456GiB"):  # read again from a store
        assert as_gpu_memory(as_gpu_memory(text)) == text


@pytest.mark.parametrize(
    "text", ["80", "-1GB", "1e99", "1e99GB", "0GB", "nan", "GB", "40gb", "40MB", "9999999GB", 5]
)
def test_another_text_is_refused_in_one_line_by_every_way_in(text: str) -> None:
    with GPUResourceManager.from_url("memory://", inventory=[Node("a", 0, {"cpus": 8}, (A100,))]) as manager:
        with pytest.raises(InvalidRequestError, match=r"^gpu_memory must be an amount in GB or GiB such as"):
            manager.submit("t", 1, gpu_memory=text)
        assert not manager.queue()
    with pytest.raises(InvalidRequestError, match=r"^gpu_memory must be"):
        Request("t", 1, gpu_memory=str(text))


def test_the_refusal_and_the_request_name_the_memory() -> None:
    with GPUResourceManager.from_url("memory://", inventory=[Node("a", 0, {"cpus": 8}, (A100,))]) as manager:
        refused = manager.allocate("t", 1, gpu_memory="80GB")
        assert str(refused) == "no server has a GPU with 80GB"
        granted = manager.submit("u", 1, gpu_memory="40GB")
        assert granted["gpu_memory"] == "40GB"


def test_a_refusal_for_unstated_memory_says_what_to_state() -> None:
    unstated = "is not stated: give gpu_memory_mib of the server in the cluster's file"
    with GPUResourceManager.from_url(
        "memory://", inventory=[Node("a", 0, {"cpus": 8}, (Gpu(0, "X"),))]
    ) as manager:
        refused = manager.allocate("t", 1, gpu_memory="80GB")
        assert str(refused) == f"no server has a GPU with 80GB: the memory of the GPUs of a {unstated}"
        [server] = manager.explain("t", 1, gpu_memory="80GB")["servers"]
        assert server["reasons"] == [f"has no GPU with 80GB: the memory of the GPUs {unstated}"]
        other = manager.allocate("t", 1, gpu_memory="80GB", gpu_types=["H100"])
        assert str(other) == "no server has an H100 with 80GB: the nearest is X"


@given(
    memory_mib=st.integers(1, 200_000),
    asked=st.lists(st.tuples(st.integers(1, 999), st.integers(1, 200)), max_size=12),
)
def test_fractions_never_exceed_the_memory_of_their_gpu(
    memory_mib: int, asked: list[tuple[int, int]]
) -> None:
    gpu = Gpu(0, "", "nvidia", memory_mib)
    cluster = ClusterState([Node("a", 0, {}, (gpu,))])
    held_gb = 0
    for number, (milli, gigabytes) in enumerate(asked):
        request = Request(f"t{number}", 1, milli, gpu_memory=f"{gigabytes}GB")
        if place := first_fit(cluster, request):
            cluster.apply(Granted(Lease(request, (place,), number + 1, 0.0), 0.0))
            held_gb += gigabytes
    assert held_gb <= nominal_gb(gpu)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_type_that_fits_is_taken_before_the_policy_chooses(nodes: int) -> None:
    servers = [
        Node(f"{kind}{n}", i, {}, (Gpu(0, kind), Gpu(1, kind)), f"{kind}{n}")
        for i, (kind, n) in enumerate((kind, n) for kind in ("A100", "H100") for n in range(2))
    ]
    cluster = ClusterState(servers)

    def types_of(types: TypeChoice, gpus: int = 2) -> set[str]:
        request = Request("t", gpus, gpu_types=("H100", "A100"), types=types, nodes=nodes)
        return {member.node[:-1] for member in select_members(cluster, request, first_fit) or ()}

    assert types_of(TypeChoice.BEST) == {"A100"}
    assert types_of(TypeChoice.FIRST) == {"H100"}
    held = Request("held", 1, gpu_types=("H100",))
    for number, name in enumerate(("H1000", "H1001")):
        place = cluster.by_name[name].place(held)
        cluster.apply(Granted(Lease(held.for_task(name), (place,), number + 1, 0.0), 0.0))
    assert types_of(TypeChoice.FIRST) == {"A100"}
    assert types_of(TypeChoice.FIRST, gpus=1) == {"H100"}


@given(
    st.lists(st.tuples(st.sampled_from([50, 100, 250, 500, 900]), st.integers(1, 60)), max_size=20),
    st.sampled_from([("A100", 81_920), ("A10", 22_731), ("", 10_000)]),
)
def test_fractions_never_ask_for_more_memory_together_than_their_gpu_has(
    asked: list[tuple[int, int]], card: tuple[str, int]
) -> None:
    """The memory of a fraction is that part of the GPU's, so what fits is accounted with its thousandths."""
    gpu = Gpu(0, card[0], memory_mib=card[1])
    cluster = ClusterState([Node("a", 0, {}, (gpu, replace(gpu, gpu_id=1)))])
    current = SchedulingPass(get_policy("best_fit"), get_order("fifo"), 0.0)
    for number, (milli, memory_gb) in enumerate(asked):
        request = Request(f"t{number}", 1, milli, gpu_memory=f"{memory_gb}GB")
        for change in allocator.allocate(cluster, request, current):
            cluster.apply(change)
    for gpu_id in (0, 1):
        held = [lease for lease in cluster.leases.values() if lease.placement.gpu_ids == (gpu_id,)]
        assert sum(int(lease.request.gpu_memory.removesuffix("GB")) for lease in held) <= nominal_gb(gpu)
