"""What a request asks for, in words."""

from __future__ import annotations

from resource_manager.core.fit import UNSTATED
from resource_manager.core.models import MILLI_PER_GPU, Amount, Link, Request
from resource_manager.core.names import short
from resource_manager.manager.plurals import counted, plural

MAX_SHOWN = 3
"""Maximum number of GPUs, types or resources named in a sentence."""


ONE_MIG_DEVICE = "a lease on MIG devices has gpus=1, since CUDA shows a process one of them"


SPELT_WITH_AN = "AEFHILMNORSX"
"""Letters whose names begin with a vowel: an A100, an RTX 6000, but a V100."""


def number(milli: int) -> str:
    """Return thousandths of GPUs as a number of GPUs: `4`, `0.5`."""
    return f"{milli / MILLI_PER_GPU:g}"


def gpus(milli: int) -> str:
    """Return thousandths of GPUs as a number with its noun: `4 GPUs`."""
    return counted(milli / MILLI_PER_GPU, "GPU")


def needed(request: Request) -> str:
    """Return the demand as a phrase, such as `4 A100 and 32 CPUs`."""
    parts = []
    if request.gpus:
        parts.append(
            f"{request.gpus} {gpu_word(request, request.gpus)}"
            if request.gpu_milli == MILLI_PER_GPU
            else f"{request.gpu_milli} milli of one {gpu_word(request, 1)}"
        )
    for name, amount in list(request.resources.items())[:MAX_SHOWN]:
        parts.append(f"{amount:g} {amount_word(name, amount)}")
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def describe(request: Request) -> str:
    """Return all of the request's demand in words."""
    parts = [
        counted(request.gpus, "GPU")
        if request.gpu_milli == MILLI_PER_GPU
        else f"{request.gpu_milli} milli of a GPU"
    ]
    if request.gpu_types:
        parts[0] += f" of type {' or '.join(request.gpu_types)}"
    if request.vendor:
        parts[0] += f" by {request.vendor}"
    if request.gpu_memory:
        parts[0] += f" with {request.gpu_memory}"
    if request.link is not Link.PREFER:
        parts[0] += f" of {'one island' if request.is_linked else 'any island'}"
    parts += [f"{amount} {amount_word(name, amount)}" for name, amount in request.resources.items()]
    if request.required_node is not None:
        parts.append(f"on {request.required_node}")
    parts += [f"with label {name}={value}" for name, value in request.labels_required.items()]
    return f"{request.nodes} times {', '.join(parts)}" if request.nodes != 1 else ", ".join(parts)


def amount_word(name: str, amount: Amount = 2) -> str:
    """Return the noun for so much of a resource: `CPU`, `CPUs`, or the name of any other."""
    return plural(amount, "CPU") if name == "cpus" else short(name)


def label_words(request: Request) -> str:
    """Return the required labels as a phrase, such as `zone=a and rack=7`."""
    return " and ".join(f"{short(name)}={short(value)}" for name, value in request.labels_required.items())


def gpu_word(request: Request, count: int) -> str:
    """Return the noun for the requested GPUs: `A100 or H100`, `GPUs by nvidia`, `GPU with 40GB` or `GPU`."""
    kind = f" by {short(request.vendor)}" if request.vendor else ""
    kind += f" with {request.gpu_memory}" if request.gpu_memory else ""
    if count != 1:
        kind += of_island(request)
    if request.gpu_types:
        types = [short(name) for name in request.gpu_types[:MAX_SHOWN]]
        more = ["another type"] if len(request.gpu_types) > MAX_SHOWN else []
        return " or ".join(types + more) + kind
    return f"{plural(count, 'GPU')}{kind}"


def of_island(request: Request) -> str:
    return " of one island" if request.is_linked else ""


def unstated_words(node: str = "") -> str:
    of = f" of {short(node)}" if node else ""
    return f"the memory of the GPUs{of} is not stated: give {UNSTATED} of the server in the cluster's file"


def among_labelled(request: Request) -> str:
    return f"of the servers with {label_words(request)}: " if request.labels_required else ""


def parts_of(request: Request) -> int:
    return len(request.resources) + (request.gpus > 0)


def unit_of(request: Request) -> str:
    return "" if request.gpu_milli == MILLI_PER_GPU else " milli"


def with_article(noun: str) -> str:
    """Return the noun with its article: `a GPU`, `an A100`."""
    is_spelt = noun[1:2].isupper() or noun[1:2].isdigit()
    return f"{'an' if noun[0] in (SPELT_WITH_AN if is_spelt else 'AEIOUaeiou') else 'a'} {noun}"
