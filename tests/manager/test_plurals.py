"""Numbers have the noun that suits them, in every sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from resource_manager.manager.plurals import counted, numbered_gpus, plural
from tests.test_architecture import ROOT

VALUE = r"(?:%[sdg]|\{[^{}]*\}|\}\})"
PLURAL = re.compile(
    rf"{VALUE} (?:new |more |pending |waiting |maintenance )?"
    r"(?:GPUs|CPUs|servers|leases|jobs|members|windows|changes|teams|requests|tasks|entries)\b"
    rf"(?! again| would)|\bGPUs {VALUE}"
)
"""A plural beside a value: in an f-string, a format of a log call, a template of an error or of a page."""

NEVER_ONE = {
    "errors.py": "beside its own words for one",
    "report_format.py": "above a limit",
    "servers.py": "above a limit, or of a list with other entries",
    "refusal_wording.py": "members of a gang, of which there are two or more",
    "cells.py": "beside its own words for one",
    "tables.py": "members of a gang, of which there are two or more",
    "server_words.py": "servers of a gang, of which there are two or more",
    "silence.py": "fell silent together",
    "job_courses.py": "a limit",
    "maintenance_windows.py": "a limit",
    "tokens.py": "a limit",
    "preempting.py": "of two or more",
    "workload.py": "of a job that is split over servers",
    "node_state.py": "an error of a placement, for developers",
    "sample.py": "a simulated month",
    "report.py": "above a limit",
    "cluster.py": "an error of the state, for developers",
    "example_gpu_approval.py": "above what a team usually takes",
    "servers.html": "above a hundred",
    "use.html": "a number with a decimal",
    "what_if.html": "above a limit",
}
"""Files with a plural that never follows a 1, and why."""


def test_a_number_has_its_noun() -> None:
    assert [counted(n, "server") for n in (0, 1, 2, 0.5)] == [
        "0 servers",
        "1 server",
        "2 servers",
        "0.5 servers",
    ]
    assert plural(1.0, "GPU") == "GPU"


@pytest.mark.parametrize(("gpu_ids", "words"), [([], "no GPU"), ([3], "GPU 3"), ([0, 2], "GPUs 0, 2")])
def test_gpus_are_named_by_their_numbers(gpu_ids: list[int], words: str) -> None:
    assert numbered_gpus(gpu_ids) == words


def sentences(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of all strings; `{}` stands for a value of an f-string."""
    parts: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            values = (str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield node.lineno, "".join(values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page's template, or the strings of a module."""
    source = path.read_text()
    return iter(enumerate(source.splitlines(), 1)) if path.suffix == ".html" else sentences(ast.parse(source))


@pytest.mark.parametrize(
    "source", ['f"{n} servers"', 'log.info("GPUs %s of %s", a, b)', 'Words("{} more jobs", n)']
)
def test_a_plural_is_seen_in_each_kind_of_sentence(source: str) -> None:
    assert [text for _, text in sentences(ast.parse(source)) if PLURAL.search(text)]


@pytest.mark.thorough
def test_no_sentence_writes_a_plural_beside_a_number_that_may_be_one() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for folder in ("resource_manager", "simulator")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".html") and path.name not in NEVER_ONE
        for line, text in texts(path)
        if PLURAL.search(text)
    ]
