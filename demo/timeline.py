"""Timeline of every task, from the manager's history: live on a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from resource_manager.cli import tables
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.core.names import display_name
from resource_manager.manager.answer_words import name_in_words
from resource_manager.rest.console.colours import Holder, assign


@dataclass(frozen=True, slots=True)
class Holding:
    """Lease of a task; times are seconds of the store's clock, `released_at` is None while it runs."""

    task_id: str
    name: str
    queued_at: float
    granted_at: float
    released_at: float | None
    server: str
    gpu_ids: tuple[int, ...]
    cpus: float


def holdings(history: Iterable[Mapping[str, Any]]) -> list[Holding]:
    """Return the leases of the history, in the order of the grants; a gang's once for each of its servers."""
    held: dict[int, list[Holding]] = {}
    for change in history:
        if change["change"] == "granted":
            lease = change["lease"]
            request = lease["request"]
            held[lease["fencing_token"]] = [
                Holding(
                    request["lease_id"],
                    display_name(request["lease_id"], request.get("labels", {})),
                    lease.get("queued_at") or lease["granted_at"],
                    lease["granted_at"],
                    None,
                    member["node"],
                    tuple(member.get("gpu_ids", ())),
                    request.get("resources", {}).get("cpus", 0),
                )
                for member in lease["members"]
            ]
        elif change["change"] in ("released", "expired"):
            token = change["fencing_token"]
            held[token] = [replace(each, released_at=change["at"]) for each in held[token]]
    return sorted((each for of_lease in held.values() for each in of_lease), key=lambda each: each.granted_at)


def overlaps(held: Sequence[tuple[str, str, Iterable[int], float, float]]) -> list[str]:
    """Return a line for each two of (task, server, GPU ids, from, to) with the same GPU at the same time."""
    per_gpu: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for task, server, gpu_ids, start, end in held:
        for gpu_id in gpu_ids:
            per_gpu.setdefault((server, gpu_id), []).append((start, end, task))
    found = []
    for (server, gpu_id), spans in per_gpu.items():
        spans.sort()
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end:
                found.append(f"GPU {gpu_id} of {server} was allocated to {first} and {second} at once")
    return found


def live_view(
    servers: Sequence[Mapping[str, Any]],
    leases: Sequence[Mapping[str, Any]],
    queue: Sequence[Mapping[str, Any]],
) -> Group:
    """Return the servers as `gpu-manager status` shows them, and the pending requests."""
    summary = {"total_servers": len(servers), "servers": servers}
    lines = (f"{name_in_words(entry)} waits: {entry['reason']}" for entry in queue)
    waiting = (Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines)
    return Group(tables.status(summary, leases, ()), *waiting)


def _colours(held: Sequence[Holding], servers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the colour of each task; consecutive tasks on one GPU differ too."""
    ids = {server["server_name"]: server["server_id"] for server in servers}
    return {
        task: colour.rgb
        for task, colour in assign(
            Holder(item.task_id, ids[item.server], item.gpu_ids, MILLI_PER_GPU, number)
            for number, item in enumerate(held)
        ).items()
    }


def draw(held: Sequence[Holding], servers: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the timeline as a picture: a row for each GPU, and the waits above them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "demo"
    from matplotlib import pyplot

    start = min(item.queued_at for item in held)
    rows = {
        (server["server_name"], gpu_id): number
        for number, (server, gpu_id) in enumerate(
            (server, gpu_id) for server in servers for gpu_id in range(server["total_gpus"])
        )
    }
    colours = _colours(held, servers)
    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    waits = {(item.task_id, item.granted_at): item for item in held}
    for number, item in enumerate(waits.values()):
        colour = colours[item.task_id]
        waited = (item.queued_at - start, item.granted_at - item.queued_at)
        axes.broken_barh(
            [waited], (-1.4 - 1.3 * number, 1.0), facecolor="none", edgecolor=colour, hatch="///"
        )
        axes.text(waited[0] + waited[1] + 0.3, -0.9 - 1.3 * number, item.name, va="center", fontsize=7)
    for item in held:
        colour = colours[item.task_id]
        lines = [rows[item.server, gpu_id] for gpu_id in item.gpu_ids]
        span = (item.granted_at - start, (item.released_at or item.granted_at) - item.granted_at)
        for line in lines:
            axes.broken_barh([span], (line + 0.08, 0.84), facecolor=colour)
        axes.text(
            span[0] + span[1] / 2,
            sum(lines) / len(lines) + 0.5,
            item.name,
            ha="center",
            va="center",
            fontsize=8,
            color="white",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
        )
    for number in range(1, len(servers)):
        axes.axhline(sum(server["total_gpus"] for server in servers[:number]), color="#999999", linewidth=0.6)
    axes.axhline(0, color="#333333", linewidth=0.8)
    first = [rows[server["server_name"], 0] + server["total_gpus"] / 2 for server in servers]
    axes.set_yticks(
        [-1.3 * len(waits) / 2 - 0.3, *first], ["waiting", *(server["server_name"] for server in servers)]
    )
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first request")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
