"""The openb trace (Weng et al., Beware of Fragmentation, USENIX ATC 2023): files, arrivals and replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Node, Request
from resource_manager.core.node_state import NodeState
from resource_manager.manager.cluster_file.servers import MAX_GPUS, MAX_GPUS_OF_SERVER
from resource_manager.manager.plurals import counted
from resource_manager.scheduling.allocator import allocate
from resource_manager.scheduling.placement.policies import Policy, get_policy
from resource_manager.scheduling.placement.policies.cpu_gpu_scores import (
    CPU_MILLI,
    dot_product_for,
    weighted_fit_for,
)
from resource_manager.scheduling.placement.policies.fgd import Fragmentation, fgd_for
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.errors import InputError
from simulator.io.rows import Row, read_csv, read_json
from simulator.progress import Progress, no_progress
from simulator.replay.workload import shapes_that_never_fit
from simulator.timing import Times, timed

NODE_LIST = "openb_node_list_gpu_node.csv"
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
"""Columns that every pod list has; without `gpu_spec` a pod accepts any type."""
ARRIVING_PERCENT = 130
"""Pods arrive until they have requested this fraction of all GPUs."""

PLACED_PER_REPORT = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """Nodes in tie-breaking order, the pods of the original list, and the pods in order of arrival.

    `misfit_rows` are the pods of the list, and `misfits` the arrivals, that no node could take even when
    empty: published results count them as arrived, and so do these.
    """

    nodes: tuple[Node, ...]
    pods: tuple[Request, ...]
    arrivals: tuple[Request, ...]
    misfit_rows: int = 0
    misfits: int = 0

    @property
    def gpu_milli(self) -> int:
        """GPU milli of the whole cluster."""
        return sum(len(node.gpus) for node in self.nodes) * MILLI_PER_GPU


class Step(NamedTuple):
    """One arrival: what has arrived and been placed so far, and the node that took it, as it is now."""

    arrived_milli: int
    used_milli: int
    node: int | None
    gpu_milli: tuple[int, ...] = ()
    cpu: float = 0


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """Result of a policy on a trace; `times` are those it took to place all pods."""

    steps: tuple[Step, ...]
    cluster: ClusterState
    times: Times


def read_trace(folder: Path, pods: str, seed: int) -> Trace:
    """Return the trace in the folder, in the seed's fixture order, or in one drawn from the seed.

    Raises `InputError` with file, line and reason.
    """
    nodes = read_nodes(folder / "csv" / NODE_LIST)
    path = folder / "csv" / f"openb_pod_list_{pods}.csv"
    if not path.exists():
        known = sorted(
            p.stem.removeprefix("openb_pod_list_") for p in path.parent.glob("openb_pod_list_*.csv")
        )
        raise InputError(f"no such pod list; found {', '.join(known) or 'none'}", path=path)
    rows = sorted(read_csv(path, POD_COLUMNS), key=lambda row: row.text("name"))
    requests = tuple(_request(row) for row in rows)
    if not requests:
        raise InputError("the pod list is empty", path=path)
    misfits = shapes_that_never_fit(requests, nodes)
    if (fixture := _fixture(folder, pods)).exists():
        order, rank = _read_fixture(fixture, seed, len(requests), len(nodes))
    else:
        order, rank = _draw(requests, nodes, seed)
    pods_in_order = (requests[row] for row in order)
    arrivals = tuple(pod.for_task(f"{pod.lease_id}#{place}") for place, pod in enumerate(pods_in_order))
    ranked = tuple(node for _, node in sorted(zip(rank, nodes, strict=True), key=lambda pair: pair[0]))
    misfit_rows, misfit_arrivals = (
        sum(pod.shape in misfits for pod in pods) for pods in (requests, arrivals)
    )
    return Trace(ranked, requests, arrivals, misfit_rows, misfit_arrivals)


def read_nodes(path: Path) -> list[Node]:
    """Return the servers of a node list; raise `InputError`."""
    nodes: dict[str, Node] = {}
    gpus_left = MAX_GPUS
    for row in read_csv(path, NODE_COLUMNS):
        name = row.text("sn")
        if not name or name in nodes:
            raise row.fail(f"the node name {name!r} is empty or used twice")
        count = row.whole("gpu", most=min(MAX_GPUS_OF_SERVER, gpus_left))
        gpus_left -= count
        gpus = tuple(Gpu(gpu_id, row.text("model")) for gpu_id in range(count))
        resources = {"cpu_milli": row.whole("cpu_milli"), "memory_mib": row.whole("memory_mib")}
        nodes[name] = Node(name, len(nodes), resources, gpus)
    if not any(node.gpus for node in nodes.values()):
        raise InputError("no node has a GPU", path=path)
    return list(nodes.values())


def _request(row: Row) -> Request:
    gpus, milli = row.whole("num_gpu"), row.whole("gpu_milli")
    if gpus == 0:
        milli = MILLI_PER_GPU
    elif milli != MILLI_PER_GPU and (gpus != 1 or not 0 < milli < MILLI_PER_GPU):
        raise row.fail(f"gpu_milli is {milli} for {counted(gpus, 'GPU')}, not 1000, or 1 to 999 of one GPU")
    if not row.text("name"):
        raise row.fail("name is empty")
    return Request(
        row.text("name"),
        gpus,
        milli,
        {"cpu_milli": row.whole("cpu_milli"), "memory_mib": row.whole("memory_mib")},
        tuple(filter(None, row.text("gpu_spec").split("|"))),
    )


def first_seed(folder: Path, pods: str) -> int:
    """Return the lowest seed for which the folder has an order of the pod list; 0 if it has none."""
    path = _fixture(folder, pods)
    orders = read_json(path) if path.exists() else None
    return min(map(int, filter(str.isdecimal, orders)), default=0) if isinstance(orders, dict) else 0


def _fixture(folder: Path, pods: str) -> Path:
    return folder / "fixtures" / f"{pods}.json.gz"


def _read_fixture(path: Path, seed: int, pods: int, nodes: int) -> tuple[list[int], list[int]]:
    value = read_json(path)
    if not isinstance(value, dict) or str(seed) not in value:
        known = ", ".join(sorted(value)) if isinstance(value, dict) else "none"
        raise InputError(f"no order for seed {seed}; the file has {known}", path=path)
    found = value[str(seed)]
    order, rank = (_integers(found, key, path, seed) for key in ("order", "node_rank"))
    if any(not 0 <= row < pods for row in order):
        raise InputError(f"the order of seed {seed} does not match the pod list of {pods} pods", path=path)
    if len(rank) != nodes:
        raise InputError(f"node_rank of seed {seed} has {len(rank)} ranks for {nodes} nodes", path=path)
    return order, rank


def _integers(record: Any, key: str, path: Path, seed: int) -> list[int]:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
        raise InputError(f"{key} of seed {seed} is not a list of whole numbers", path=path)
    return value


def _draw(pods: tuple[Request, ...], nodes: list[Node], seed: int) -> tuple[list[int], list[int]]:
    """Return all pods shuffled, then random pods until 130 % of the GPUs are requested; ranks shuffled."""
    draw = random.Random(seed)
    limit = sum(len(node.gpus) for node in nodes) * MILLI_PER_GPU * ARRIVING_PERCENT // 100
    demand = [pod.gpus * pod.gpu_milli for pod in pods]
    if not any(demand):
        raise InputError("no pod requests a GPU, so no load can be reached")
    rows = list(range(len(pods)))
    draw.shuffle(rows)
    order: list[int] = []
    arrived = 0
    while arrived < limit:
        row = rows[len(order)] if len(order) < len(rows) else draw.randrange(len(pods))
        order.append(row)
        arrived += demand[row]
    rank = list(range(len(nodes)))
    draw.shuffle(rank)
    return order, rank


def policy_for(name: str, fragmentation: Fragmentation, seed: int) -> Policy:
    """Return the policy as the published study measures it: CPU in milli, and the trace's own task mix.

    Its best fit weighs CPU against GPU, where ours counts free GPUs. Raises `PolicyError`.
    """
    match name:
        case "fgd":
            return fgd_for(fragmentation)
        case "best_fit":
            return weighted_fit_for(CPU_MILLI)
        case "dot_product":
            return dot_product_for(CPU_MILLI)
    return get_policy(name, seed=seed)


def place(trace: Trace, policy: Policy, progress: Progress = no_progress) -> PlacementResult:
    """Try each arriving pod once, in order; nothing departs."""
    cluster = ClusterState(trace.nodes)
    by_name = cluster.by_name
    steps: list[Step] = []
    arrived = used = 0
    with timed() as times:
        for request in trace.arrivals:
            milli = request.gpus * request.gpu_milli
            arrived += milli
            changes = allocate(cluster, request, SchedulingPass(policy, fifo, 0.0))
            if changes:
                cluster.apply(changes[0])
                used += milli
                node = by_name[cluster.last_node or ""]
                free = node.free["cpu_milli"]
                steps.append(Step(arrived, used, node.index, tuple(node.gpu_free.values()), free))
            else:
                steps.append(Step(arrived, used, None))
            if not len(steps) % PLACED_PER_REPORT:
                progress(len(steps), len(trace.arrivals))
    progress(len(steps), len(trace.arrivals))
    return PlacementResult(tuple(steps), cluster, times)


CURVE_COLUMNS = ("arrived_percent", "allocated_percent", "frag_amount_percent", "frag_ratio_percent")

CurveRow = tuple[int, float, float, float]


def curve(trace: Trace, placed: PlacementResult, fragmentation: Fragmentation) -> list[CurveRow]:
    """Return rows of (arrived %, allocated %, fragmentation amount %, fragmentation ratio %), x = 0 to 130.

    A row is the mean over the pods with that x. As published, allocated and ratio of a pod are rounded to
    two decimals before the mean, the amount is not; a mean of amounts or allocated is rounded. A row without
    a pod repeats the one before.
    """
    import numpy as np

    total = trace.gpu_milli
    nodes = [NodeState(node, index) for index, node in enumerate(trace.nodes)]
    of_node = [fragmentation.of_node(node) for node in nodes]
    amount = sum(of_node)
    columns: dict[int, list[tuple[float, float, float]]] = {}
    for step in placed.steps:
        if step.node is not None:
            cpu_step = fragmentation.cpu_step(step.cpu)
            now = fragmentation.amount(nodes[step.node].gpu_types, list(step.gpu_milli), cpu_step)
            amount += now - of_node[step.node]
            of_node[step.node] = now
        idle = total - step.used_milli
        ratio = round(100 * amount / idle, 2) if idle else 0.0
        point = (round(100 * step.used_milli / total, 2), 100 * amount / total, ratio)
        columns.setdefault(round(100 * step.arrived_milli / total), []).append(point)
    rows: list[CurveRow] = []
    last = (0.0, 100 * sum(fragmentation.of_node(node) for node in nodes) / total, 0.0)
    for x in range(ARRIVING_PERCENT + 1):
        if x in columns:
            # One array per quantity: the published means are numpy's, which sum pairwise.
            allocated, amounts, ratios = (np.array(values) for values in zip(*columns[x], strict=True))
            last = (
                float(np.round(np.mean(allocated), 2)),
                float(np.round(np.mean(amounts), 2)),
                float(np.mean(ratios)),
            )
        rows.append((x, *last))
    return rows


def curve_of(rows: Sequence[CurveRow]) -> dict[str, list[float]]:
    """Return the values of each column of a curve."""
    return dict(zip(CURVE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))


def replay(
    trace: Trace, policy_name: str, seed: int, progress: Progress = no_progress
) -> tuple[dict[str, Any], list[CurveRow]]:
    """Return summary and curve of one policy over the trace; both percentages are those of the last row."""
    fragmentation = Fragmentation.of(trace.pods, CPU_MILLI.cpu_name)
    from simulator.replay import compiled_placement  # numba takes half a second to import

    policy: Policy
    if policy_name in compiled_placement.POLICIES:
        policy = compiled_placement.CompiledPolicy(
            trace.nodes, trace.arrivals, policy_name, fragmentation, seed
        )
    else:
        policy = policy_for(policy_name, fragmentation, seed)
    placed = place(trace, policy, progress)
    rows = curve(trace, placed, fragmentation)
    summary = {
        "policy": policy_name,
        "pods": len(placed.steps),
        "placed": len(placed.cluster.leases),
        "never_fit": trace.misfits,
        "never_fit_rows": trace.misfit_rows,
        "allocated_percent": rows[-1][1],
        "frag_ratio_percent": round(rows[-1][3], 2),
        "wall_s": round(placed.times.wall_s, 3),
        "cpu_s": round(placed.times.cpu_s, 3),
        "pods_per_s": round(placed.times.per_s(len(placed.steps))),
    }
    return summary, rows
