"""Inventory of servers, written from what they report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from resource_manager.agent.probe import EMPTY_MIG
from resource_manager.agent.report_format import GpuReport, Report
from resource_manager.core.models import Gpu
from resource_manager.manager.cluster_file.positions import quoted


@dataclass(frozen=True, slots=True)
class Discovered:
    """A server as it is to be in the inventory: its address for the launchers, and its report."""

    address: str
    report: Report


def inventory_toml(servers: Sequence[Discovered]) -> str:
    """Return the text of an inventory file that pins every GPU's UUID.

    GPUs on which nothing can run are left out, with a comment.
    """
    return "\n".join("\n".join(_server(server)) + "\n" for server in servers)


def _server(server: Discovered) -> Iterable[str]:
    report = server.report
    yield "[[servers]]"
    yield f"name = {quoted(report.server)}"
    if server.address:
        yield f"address = {quoted(server.address)}"
    yield f"cpus = {report.cpus or 0}"
    if report.memory_mib is not None:
        yield f"memory_mib = {report.memory_mib}"
    present = usable(report)
    if present and present[0].vendor != "nvidia":
        yield f"vendor = {quoted(present[0].vendor)}"
    for gpu in report.gpus:
        if (reason := _why_left_out(gpu)) is not None:
            yield f"# GPU {gpu.index} is left out: {reason}"
    for _, group in groupby(present, key=_kind):
        yield ""
        yield from _group(list(group))


def usable(report: Report) -> list[GpuReport]:
    """Return the GPUs on which something can run."""
    return [gpu for gpu in report.gpus if _why_left_out(gpu) is None]


def pinned_gpus(report: Report) -> list[Gpu]:
    """Return the GPUs as an inventory with these tables has them."""
    return [
        Gpu(gpu.index, gpu.type, gpu.vendor, gpu.memory_mib or 0, gpu.uuid or "") for gpu in usable(report)
    ]


def _why_left_out(gpu: GpuReport) -> str | None:
    if gpu.lost:
        return "it does not answer"
    return "it is in MIG mode and has no MIG device" if gpu.vendor_state == EMPTY_MIG else None


def _kind(gpu: GpuReport) -> tuple[object, ...]:
    return gpu.type, gpu.vendor, gpu.memory_mib, gpu.numa_node, gpu.nvlink_group, not gpu.uuid, not gpu.pci


def _group(gpus: list[GpuReport]) -> Iterable[str]:
    first = gpus[0]
    yield "[[servers.gpus]]"
    yield f"ids = {[gpu.index for gpu in gpus]}"
    yield f"type = {quoted(first.type)}"
    if first.vendor != "nvidia":
        yield f"vendor = {quoted(first.vendor)}"
    if first.memory_mib is not None:
        yield f"memory_mib = {first.memory_mib}"
    if first.uuid is not None:
        yield f"uuids = {_list(gpu.uuid for gpu in gpus)}"
    if first.pci is not None:
        yield f"pci = {_list(gpu.pci for gpu in gpus)}"
    if first.numa_node is not None:
        yield f"numa_node = {first.numa_node}"
    if first.nvlink_group is not None:
        yield f"nvlink_group = {first.nvlink_group}"


def _list(texts: Iterable[str | None]) -> str:
    return "[\n" + "".join(f"  {quoted(text or '')},\n" for text in texts) + "]"
