"""The Python examples of the documentation run, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "airflow" in code or "provider" in code:
        compile(code, "example", "exec")
        pytest.skip("a DAG: the files in dags/ are run instead, by tests/e2e")
    if "http://" in code:
        compile(code, "example", "exec")
        pytest.skip("needs a running service: tests/api calls it")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing
