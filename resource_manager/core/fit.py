"""Check of whether a request fits a node, now or ever, with the shortages if it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from resource_manager.core.gpu_memory import has_memory, is_unstated
from resource_manager.core.models import MILLI_PER_GPU, Amount, Gpu, Link, Node, Request


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Free capacity of a node at one moment: milli by GPU id in ascending order, amounts by resource."""

    gpus: Mapping[int, int]
    amounts: Mapping[str, Amount]

    def intersect(self, other: FreeCapacity) -> FreeCapacity:
        """Return the capacity free in both: the minimum for each GPU and resource."""
        amounts, more = self.amounts, other.amounts
        return FreeCapacity(
            {gpu_id: min(milli, other.gpus[gpu_id]) for gpu_id, milli in self.gpus.items()},
            {name: min(amount, more.get(name, 0)) for name, amount in amounts.items()},
        )

    def minus(self, request: Request, gpu_ids: Collection[int]) -> FreeCapacity:
        """Return what is free after an allocation of the request."""
        gpus, amounts = dict(self.gpus), dict(self.amounts)
        for gpu_id in gpu_ids:
            if gpu_id in gpus:
                gpus[gpu_id] -= request.gpu_milli
        for name, amount in request.resources.items():
            amounts[name] = amounts.get(name, 0) - amount
        return FreeCapacity(gpus, amounts)


def total_capacity(node: Node) -> FreeCapacity:
    """Return what is free on the node when it is empty."""
    gpu_ids = sorted(gpu.gpu_id for gpu in node.gpus)
    return FreeCapacity(dict.fromkeys(gpu_ids, MILLI_PER_GPU), node.resources)


def is_short(free: Amount, amount: Amount) -> bool:
    """Return True if less is free than the amount, by more than sums of floats are out: 0.6 is 3 × 0.2.

    Of what there is none, any amount is short, however small.
    """
    lack = amount - free
    return lack > 0 and (free <= 0 < amount or type(lack) is int or lack > 1e-9 * max(1.0, amount))


UNSTATED = "gpu_memory_mib"
"""Key of the inventory file that states the memory of a server's GPUs."""


class ShortageKind(StrEnum):
    """Kind of a shortage."""

    SERVER = "server"
    LABELS = "labels"
    GPU_TYPE = "gpu_type"
    GPUS = "gpus"
    AMOUNT = "amount"


@dataclass(frozen=True, slots=True)
class Shortage:
    """One reason why a request does not fit; GPUS and AMOUNT also set `name`, `has` and `wants`.

    GPU_TYPE names `UNSTATED` if the GPUs would do but for their memory, which the inventory does not state.
    """

    kind: ShortageKind
    name: str = ""
    has: Amount = 0
    wants: Amount = 0


def shortages(node: Node, request: Request, free: FreeCapacity | None = None) -> Iterator[Shortage]:
    """Yield each shortage of the node for the request: against `free`, or against its total capacity.

    Ignores whether the node takes new leases: that is its state, not its capacity.
    """
    if request.required_node is not None and request.required_node != node.name:
        yield Shortage(ShortageKind.SERVER)
    if request.labels_required and not has_labels(node, request):
        yield Shortage(ShortageKind.LABELS)
    if not accepts_node(node, request):
        yield Shortage(ShortageKind.GPU_TYPE, UNSTATED if lacks_stated_memory(node, request) else "")
    elif request.gpus and (has := count_gpus(node, request, free)) < request.gpus:
        yield Shortage(ShortageKind.GPUS, "gpus", has, request.gpus)
    amounts = node.resources if free is None else free.amounts
    for name, amount in request.resources.items():
        if is_short(amounts.get(name, 0), amount):
            yield Shortage(ShortageKind.AMOUNT, name, amounts.get(name, 0), amount)


def fits(node: Node, request: Request, free: FreeCapacity) -> bool:
    """Return True if the request fits the node with that free capacity."""
    return next(shortages(node, request, free), None) is None


def could_ever_fit(node: Node, request: Request) -> bool:
    """Return True if the request fits the node when it is empty."""
    return next(shortages(node, request), None) is None


def can_meet(node: Node, request: Request) -> bool:
    """Return True if the members of a lease can meet on the node: it has an address, or there is but one."""
    return request.nodes == 1 or bool(node.address)


def accepted_gpu_ids(node: Node, request: Request) -> set[int]:
    """Return the ids of the node's GPUs, free or not, that the request accepts: type, vendor, memory, MIG.

    A request for several GPUs accepts no MIG device, since CUDA shows one of them to a process.
    """
    return {
        gpu.gpu_id
        for gpu in node.gpus
        if _accepts_kind(gpu, request) and not (request.gpus > 1 and gpu.is_mig)
    }


def _accepts_kind(gpu: Gpu, request: Request) -> bool:
    return _accepts_type(gpu, request) and (
        not request.gpu_memory or has_memory(gpu, request.gpu_memory, request.gpu_milli)
    )


def _accepts_type(gpu: Gpu, request: Request) -> bool:
    return (not request.gpu_types or gpu.gpu_type in request.gpu_types) and (
        not request.vendor or gpu.vendor == request.vendor
    )


def lacks_stated_memory(node: Node, request: Request) -> bool:
    """Return True if GPUs of the node would be accepted if the inventory said how much memory they have."""
    return bool(request.gpu_memory) and any(
        _accepts_type(gpu, request) and is_unstated(gpu, request.gpu_memory) for gpu in node.gpus
    )


def has_mig_devices_for(node: Node, request: Request) -> bool:
    """Return True if the node has MIG devices of a kind that a request for several GPUs would accept."""
    return request.gpus > 1 and any(gpu.is_mig and _accepts_kind(gpu, request) for gpu in node.gpus)


def _accepts_any(node: Node, request: Request) -> bool:
    return not request.is_particular and not (request.gpus > 1 and any(gpu.is_mig for gpu in node.gpus))


def usable_gpus(node: Node, request: Request, gpus: Mapping[int, int]) -> list[int]:
    """Return the ids of the GPUs with enough free milli and of an accepted kind, in order.

    For a request that takes only GPUs of one island these are the GPUs of islands with enough of them.
    """
    ids = _of_kind(node, request, gpus)
    if not request.is_linked:
        return ids
    groups = of_islands(ids, node.islands)
    joined = set(chain.from_iterable(group for group in groups if len(group) >= request.gpus))
    return [gpu_id for gpu_id in ids if gpu_id in joined]


def of_islands(ids: Collection[int], islands: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return these of the GPUs of each island, in order."""
    return [[gpu_id for gpu_id in ids if gpu_id in island] for island in islands]


def _of_kind(node: Node, request: Request, gpus: Mapping[int, int]) -> list[int]:
    milli = request.gpu_milli
    ids = [gpu_id for gpu_id, free in gpus.items() if free >= milli]
    if _accepts_any(node, request):
        return ids
    accepted = accepted_gpu_ids(node, request)
    return [gpu_id for gpu_id in ids if gpu_id in accepted]


def count_gpus(node: Node, request: Request, free: FreeCapacity | None = None) -> int:
    """Return the number of GPUs the request can use: now, given `free`, or on the empty node.

    If they must be of one island it is the number of the fullest.
    """
    if request.is_linked:
        gpus = (free or total_capacity(node)).gpus
        return max(map(len, of_islands(_of_kind(node, request, gpus), node.islands)), default=0)
    if free is not None:
        return len(usable_gpus(node, request, free.gpus))
    return len(node.gpus) if _accepts_any(node, request) else len(accepted_gpu_ids(node, request))


def pick_gpus(
    request: Request, usable: list[int], gpus: Mapping[int, int], islands: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Return the first usable GPUs; for a GPU fraction, the usable GPU with the least free milli.

    Whole ones are of one of the `islands` where possible, the fullest that has enough, unless any will do.
    """
    if request.gpus and request.gpu_milli != MILLI_PER_GPU:
        return (min(usable, key=gpus.__getitem__),)
    if not islands or request.link is Link.ANY:
        return tuple(usable[: request.gpus])
    return _of_few_islands(request.gpus, usable, islands)


def _of_few_islands(count: int, usable: list[int], islands: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return so many GPUs of as few islands as possible; what is left over is of the fullest that has it."""
    groups = of_islands(usable, islands)
    joined = set(chain.from_iterable(islands))
    groups += [[gpu_id] for gpu_id in usable if gpu_id not in joined]
    taken: list[int] = []
    while left := count - len(taken):
        enough = [group for group in groups if len(group) >= left]
        group = min(enough, key=len) if enough else max(groups, key=len)
        taken += group[:left]
        groups.remove(group)
    return tuple(sorted(taken))


def accepts_node(node: Node, request: Request) -> bool:
    """Return True if the node as a whole has a kind of GPU that the request accepts."""
    if not request.is_particular:
        return True
    if not node.gpus:
        return not (request.gpu_types or request.gpu_memory) and (
            not request.vendor or node.vendor == request.vendor
        )
    return any(_accepts_kind(gpu, request) for gpu in node.gpus)


def has_labels(node: Node, request: Request) -> bool:
    """Return True if the node has every label that the request requires."""
    return all(node.labels.get(name) == value for name, value in request.labels_required.items())
