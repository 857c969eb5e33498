"""The folders are the architecture: each imports only what stands before it, and nothing runs in a circle."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LADDER = (
    ("words", "lazy"),
    ("errors",),
    ("settings", "core"),
    ("scheduling",),
    ("storage",),
    ("manager",),
    ("jobs",),
    ("agent",),  # it runs jobs
    ("fleet",),
    ("rest",),
    ("cli",),
    ("airflow",),
    ("testing",),
)
"""The parts of resource_manager; each may import itself and the parts of earlier rows."""

OF_SIMULATOR = (
    "lazy",
    "errors",
    "settings",  # the live default order, for a replay of one's own history
    "core",
    "scheduling",
    "storage",
    "manager.cluster_file",  # rules of teams on a trace, from the file that the manager takes
    "manager.plurals",  # numbers with their nouns
    "manager.refusal_wording",  # a job that never fits is refused in the manager's words
    "cli.base",
)
"""The parts of resource_manager that the simulator may import."""

OF_AIRFLOW = "resource_manager.airflow.version_compat"
"""The names that differ between versions of Airflow: every part may import it, since it imports none."""

QUEUE_ORDERS = "resource_manager.scheduling.queue.orders"
"""The file of all queue orders."""

MODULES_AT_ROOT = ("__init__", "__main__", "errors", "lazy", "settings", "testing", "words")
AT_ROOT = {"py.typed", *(f"{name}.py" for name in MODULES_AT_ROOT)}
PURE = ("core", "scheduling")
IMPURE = {
    "asyncio",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def is_module(name: str) -> bool:
    place = ROOT / Path(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every part of the file that a test here reads; a file is parsed once for all of them."""
    kinds = (
        ast.Import
        | ast.ImportFrom
        | ast.Call
        | ast.Attribute
        | ast.BinOp
        | ast.FunctionDef
        | ast.AsyncFunctionDef
    )
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, kinds))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that the file names in an import, wherever in the file."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: say the whole name of what is imported"
            module = node.module or ""
            parts = {f"{module}.{alias.name}" for alias in node.names}
            found = {part for part in parts if is_module(part)}
            names |= found | ({module} if len(found) < len(parts) else set())
    return frozenset(names)


def rung_of(name: str) -> int:
    part = name.split(".")[1]
    return next(i for i, parts in enumerate(LADDER) if part in parts)


DEPLOYED = ROOT / "resource_manager" / "deploy"
"""What users get as files of theirs; nothing of it is imported."""

PRODUCT = [
    path
    for path in modules("resource_manager")
    if name_of(path) != "resource_manager" and DEPLOYED not in path.parents
]


def test_the_root_holds_no_part() -> None:
    assert {path.name for path in (ROOT / "resource_manager").iterdir() if path.is_file()} == AT_ROOT
    parts = {path.parent.name for path in (ROOT / "resource_manager").glob("*/__init__.py")}
    assert parts == {part for row in LADDER for part in row} - {name.removesuffix(".py") for name in AT_ROOT}


@pytest.mark.parametrize("row", LADDER, ids=" ".join)
def test_imports_climb_one_way(row: tuple[str, ...]) -> None:
    files = [path for path in PRODUCT if name_of(path).split(".")[1] in row]
    assert files
    for here, name in ((name_of(path), name) for path in files for name in imports(path)):
        assert name.split(".")[0] not in {"simulator", "plugins", "dags", "demo", "tests"}
        if name.startswith("resource_manager.") and name != OF_AIRFLOW:
            assert here != OF_AIRFLOW, f"{here} imports {name}"
            same_part = name.split(".")[1] == here.split(".")[1]
            assert same_part or rung_of(name) < rung_of(here), f"{here} imports {name}, which stands above it"


def test_the_simulator_takes_the_allocator_and_no_more() -> None:
    for path in modules("simulator"):
        for name in imports(path):
            if name.startswith("resource_manager."):
                part = name.removeprefix("resource_manager.")
                allowed = any(part == each or part.startswith(f"{each}.") for each in OF_SIMULATOR)
                assert allowed, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", [p for p in PRODUCT if name_of(p).split(".")[1] in PURE], ids=name_of)
def test_pure_rooms_import_the_standard_library_only(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        assert top == "resource_manager" or top in sys.stdlib_module_names, f"{name_of(path)} imports {name}"
        assert top not in IMPURE, f"{name_of(path)} imports {name}: clock, I/O and randomness are arguments"
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr in {"now", "today", "utcnow"}:
            assert ast.unparse(node.value) not in {"datetime", "date"}, (
                f"{name_of(path)}:{node.lineno} reads a clock"
            )


@pytest.mark.parametrize("package", ["resource_manager", "simulator"])
def test_no_circle_of_imports(package: str) -> None:
    known = {name_of(path): path for path in modules(package)}
    graph = {
        name: {target for target in imports(path) if target in known and target != name}
        for name, path in known.items()
        if path.name != "__init__.py"  # a package may list what is in it
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in PRODUCT
        if name_of(path).split(".")[1] in PURE
        and path.name != "__init__.py"
        and path.parent.name != "policies"
    ],
    ids=name_of,
)
def test_every_module_of_a_pure_room_has_a_test_file_of_its_name(path: Path) -> None:
    """Policies, which are one contract, are tested together in policies/test_policies.py."""
    room = path.relative_to(ROOT / "resource_manager").parent
    assert (ROOT / "tests" / room / f"test_{path.name}").is_file()


def test_nobody_asks_which_lease_service_they_have() -> None:
    """What differs between a store and a service is answered by a method of both."""
    for path in PRODUCT:
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"isinstance", "hasattr"}
            ):
                asked = ast.unparse(node)
                kinds = ("GPUResourceManager", "ServiceClient", "LeaseService", "hasattr(manager")
                assert not any(kind in asked for kind in kinds), f"{path}:{node.lineno}: {asked}"
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                assert not {"GPUResourceManager", "ServiceClient"} <= {*ast.unparse(node).split(" | ")}, path


MURI = ROOT / "simulator" / "replay" / "muri.py"
"""A published study, which has orders of its own under the same names."""


def test_a_queue_order_is_added_in_one_file() -> None:
    """Commands, forms, files and reports read the registered orders: no other file has to name a new one.

    Told by one of the simple ones, which only its own file names.
    """
    files = [*modules("resource_manager"), *modules("simulator"), *modules("plugins"), *modules("dags")]
    named = re.compile(r"\bsrsf\b")
    naming = [path for path in files if path != MURI and named.search(path.read_text(encoding="utf-8"))]
    assert [name_of(path) for path in naming] == [QUEUE_ORDERS]


def test_no_test_asserts_a_private_attribute() -> None:
    """A test says what its module promises; a private attribute may change with every line."""
    texts = {path: path.read_text(encoding="utf-8") for path in modules("tests")}
    assert texts
    for path in (path for path, text in texts.items() if re.search(r"\._[a-z]", text)):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Assert):
                for part in ast.walk(node.test):
                    if isinstance(part, ast.Attribute) and re.match(r"_[a-z]", part.attr):
                        assert ast.unparse(part.value) == "self", f"{path}:{node.lineno}: {ast.unparse(part)}"


MAX_LINES = 400

PROBE = "resource_manager.agent.probe"
"""The one file that runs on a server without the package."""


def test_a_file_is_one_idea_long() -> None:
    files = [*modules("resource_manager"), *modules("simulator")]
    long = [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES]
    assert [name_of(path) for path in long] == [PROBE]


SAID_BY_HOW = {"asked", "found", "held", "kept", "look", "told"}
"""Words that say how one came by a thing, and not what it is."""

NAMED = ("resource_manager", "simulator")


@pytest.mark.parametrize("folder", NAMED)
def test_functions_and_parameters_are_named_by_what_they_return_or_hold(folder: str) -> None:
    names = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                names += [(path, name) for name in (node.name, *(each.arg for each in parameters))]
    assert [f"{path}: {name}" for path, name in names if name.strip("_") in SAID_BY_HOW] == []
    assert [path for path in (ROOT / folder).rglob("*.py") if path.stem in SAID_BY_HOW] == []
