"""Numbers with their nouns, and lists, the same in all sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from resource_manager.core.models import Amount


def counted(number: Amount, noun: str) -> str:
    """Return the number with its noun: `1 server`, `2 servers`, `0.5 GPUs`."""
    text = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{text} {plural(number, noun)}"


def plural(number: Amount, noun: str) -> str:
    """Return the noun for so many: `server`, `servers`."""
    return noun if number == 1 else f"{noun}s"


def times(number: int, text: str) -> str:
    """Return what there is so many times: `2 × 8 GPUs`, once `8 GPUs`."""
    return text if number == 1 else f"{number} × {text}"


def numbered_gpus(gpu_ids: Collection[int]) -> str:
    """Return GPUs by their numbers: `GPU 0`, `GPUs 0, 1`, `no GPU`."""
    if not gpu_ids:
        return "no GPU"
    return f"{plural(len(gpu_ids), 'GPU')} {', '.join(map(str, gpu_ids))}"


def one_of(names: Iterable[str]) -> str:
    """Return the names as a choice: `fifo, priority or tiresias`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
