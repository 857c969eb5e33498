"""Rules on the direction of imports, and on pure modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    ("lazy",),
    ("errors", "direct_init", "extras"),
    ("models",),
    ("node_state", "deadlines"),
    ("node_index",),
    ("cluster",),
    ("refusal", "runtime_history"),
    ("policies", "queueing", "reservations", "admission"),
    ("allocator",),
    ("explain", "estimates"),
    ("colours", "schemas", "views", "history", "archive"),
    ("outage", "redaction", "server_clock"),
    ("redis_client",),
    ("stores", "locks", "settings", "inventory"),
    ("learning",),
    ("transactions", "requests"),
    ("manager", "aio"),
    ("launchers", "task_identity"),
    ("airflow_instance",),
    ("client", "reconcile", "airflow_api"),
    ("api", "provider", "cli", "bench", "command_line"),
    ("airflow",),
)
"""Layers of resource_manager: each may import only itself and those before it."""

PURE = {
    "admission",
    "colours",
    "errors",
    "models",
    "node_state",
    "node_index",
    "deadlines",
    "cluster",
    "policies",
    "queueing",
    "allocator",
    "refusal",
    "runtime_history",
    "explain",
    "estimates",
    "reservations",
}
IMPURE = {"airflow", "redis", "flask", "time", "random"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "resource_manager").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules("resource_manager"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    here = part_of(path)
    found = imports(path)
    assert not any(name.split(".")[0] in {"simulator", "plugins", "dags"} for name in found)
    if here == "__init__":
        return
    assert here in level, f"{here} has no layer: add it to LAYERS"
    for name in found:
        head, _, tail = name.partition(".")
        if head == "resource_manager" and tail and (target := tail.split(".")[0]) in level:
            assert level[target] <= level[here], f"{path} imports {name} from a layer above its own"


@pytest.mark.parametrize(
    "path",
    [p for p in modules("resource_manager") if part_of(p) in PURE],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_pure_modules_import_no_io_time_or_randomness(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & IMPURE
