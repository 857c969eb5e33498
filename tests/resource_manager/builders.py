"""What many tests begin with: servers by letter, and a clock of their own."""

from __future__ import annotations

from resource_manager.models import Gpu, Node


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def node(letter: str, gpus: int = 2, cpus: int = 8) -> Node:
    """The server of that name, whose number is its place in the alphabet."""
    return Node(letter, ord(letter) - ord("a"), {"cpus": cpus}, tuple(Gpu(i) for i in range(gpus)))


def nodes(letters: str, gpus: int = 2, cpus: int = 8) -> tuple[Node, ...]:
    return tuple(node(letter, gpus, cpus) for letter in letters)
