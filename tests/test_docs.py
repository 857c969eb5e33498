"""Tests of the documentation: all examples run, all links have a target."""

from __future__ import annotations

import re
import threading
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from werkzeug.serving import make_server

from resource_manager import GPUResourceManager, Settings
from resource_manager.manager.inventory_file import load_inventory
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.tokens import Role

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVICE, TOKEN = "http://localhost:5000", "gpm_…"
"""Placeholders of the pages for the reader's own values."""


def examples(language: str) -> list[tuple[str, str]]:
    """Return the name and text of every block in that language."""
    return [
        (f"{page.relative_to(ROOT)}:{number}", code)
        for page in PAGES
        for number, code in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL), 1)
    ]


def parametrize(found: list[tuple[str, str]]) -> pytest.MarkDecorator:
    assert found
    return pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in found])


def is_dag(code: str) -> bool:
    return "import DAG" in code


PYTHON = examples("python")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the address of a service, and a token for it."""
    manager = GPUResourceManager.from_url("memory://")
    kept = persistence_of(Settings(store="memory://"), tmp_path_factory.mktemp("tokens") / "tokens.json")
    token = tokens.create(kept.tokens, "reader-of-the-pages", Role.USER)
    app = create_app(standalone(manager, kept))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.port}", token
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@parametrize([(name, code) for name, code in PYTHON if not is_dag(code)])
def test_an_example_runs(
    code: str, service: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace(SERVICE, service[0]).replace(TOKEN, service[1]), "example", "exec"), {})


@pytest.mark.filterwarnings("ignore")
@parametrize([(name, code) for name, code in PYTHON if is_dag(code)])
def test_an_example_is_a_dag(code: str, tmp_path: Path) -> None:
    """Airflow loads it as a file of its DAGs folder; tests/test_distribution.py runs the README's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Airflow's import
        from airflow.dag_processing.dagbag import DagBag

    (tmp_path / "example.py").write_text(code)
    bag = DagBag(str(tmp_path))
    assert bag.import_errors == {}
    assert bag.dags
    assert all(dag.description and dag.tasks for dag in bag.dags.values())


@parametrize([(name, code) for name, code in examples("toml") if "[[servers]]" in code])
def test_an_inventory_can_be_loaded(code: str, tmp_path: Path) -> None:
    (tmp_path / "servers.toml").write_text(code)
    assert load_inventory(tmp_path / "servers.toml")


@parametrize(examples("toml"))
def test_toml_can_be_read(code: str) -> None:
    assert tomllib.loads(code)


def test_no_page_names_an_unpublished_package() -> None:
    sources = [
        ROOT / "Makefile",
        *(ROOT / "resource_manager").rglob("*.py"),
        *(ROOT / "simulator").rglob("*.py"),
    ]
    for path in [*PAGES, *sources]:
        assert not re.search(r"pip install [^\n]*gpu-resource-manager", path.read_text()), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing
