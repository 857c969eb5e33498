"""A package of placement policies as an outside author may write them: most have a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

CODE = """
from dataclasses import replace
from resource_manager.core.models import Placement
from resource_manager.scheduling.placement.policies import POLICIES

first_fit = POLICIES["first_fit"]
Number = 5

def good(cluster, request): return first_fit(cluster, request)
def whole_numbers(cluster, request):
    found = first_fit(cluster, request)
    return found and replace(found, gpu_ids=[Index(gpu_id) for gpu_id in found.gpu_ids])
def raises(cluster, request): raise KeyError("boom")
def twice(cluster, request):
    found = first_fit(cluster, request)
    return found and replace(found, gpu_ids=found.gpu_ids[:1] * len(found.gpu_ids))
def taken(cluster, request): return Placement(cluster.nodes[0].name, tuple(range(request.gpus)))
def unknown(cluster, request): return Placement("nowhere", tuple(range(request.gpus)))
def pair(cluster, request): return (cluster.nodes[0].name, (0,))
def letters(cluster, request): return Placement(cluster.nodes[0].name, "ab")
def at_most_two(cluster, request):
    if request.gpus > 2: raise ValueError("too wide")
    return first_fit(cluster, request)
def chooses_none(cluster, request): return None
def one_argument(cluster): return None

class Index:
    def __init__(self, value): self.value = value
    def __index__(self): return self.value

class Seeded:
    def __init__(self, seed=0): self.seed = seed
    def with_seed(self, seed): return Seeded(seed)
    def scores(self, cluster, request): return {"a": self.seed}
    def __call__(self, cluster, request): return None
seeded = Seeded()
"""

NAMES = (
    *("good", "whole_numbers", "raises", "twice", "taken", "unknown", "pair", "letters", "one_argument"),
    *("at_most_two", "chooses_none"),
    *("seeded", "Number", "missing"),
)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package into the folder, and have this process find it."""
    (folder / "our_policies.py").write_text(CODE)
    dist = folder / "our_policies-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: our-policies\nVersion: 1.0\n")
    points = "".join(f"{name} = our_policies:{name}\n" for name in NAMES)
    (dist / "entry_points.txt").write_text(f"[gpu_resource_manager.policies]\n{points}")
    monkeypatch.syspath_prepend(folder)
