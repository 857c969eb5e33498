"""Builders for tests: nodes named by letter, and a fake clock."""

from __future__ import annotations

from resource_manager.core.models import Gpu, Node


class Clock:
    """Fake clock that a test advances by `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def node(letter: str, gpus: int = 2, cpus: int = 8) -> Node:
    """Return the node of that name; its server id is the position of the letter in the alphabet."""
    return Node(letter, ord(letter) - ord("a"), {"cpus": cpus}, tuple(Gpu(i) for i in range(gpus)))


def nodes(letters: str, gpus: int = 2, cpus: int = 8) -> tuple[Node, ...]:
    return tuple(node(letter, gpus, cpus) for letter in letters)
