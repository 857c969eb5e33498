"""Numbers have the noun that suits them, in every sentence."""

from __future__ import annotations

import ast
import re

import pytest

from resource_manager.manager.plurals import counted, numbered_gpus, plural
from tests.test_architecture import ROOT

NOUNS = re.compile(
    r"^ (?:new |more |pending |waiting |maintenance )?"
    r"(?:GPUs|CPUs|servers|leases|jobs|members|windows|changes|teams|requests|tasks)\b(?! of| again)"
)

NEVER_ONE = {
    "errors.py": "beside its own words for one",
    "report_format.py": "above a limit",
    "servers.py": "above a limit, or of a list with other entries",
    "maintenance.py": "at a limit",
    "refusal_wording.py": "members of a gang, of which there are two or more",
    "cells.py": "beside its own words for one",
    "tables.py": "members of a gang, of which there are two or more",
    "reconcile.py": "of each",
    "tokens.py": "a limit",
    "preempting.py": "of two or more",
    "cluster.py": "an error of the state, for developers",
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


def test_no_sentence_writes_a_plural_behind_a_number_that_may_be_one() -> None:
    wrong = []
    for path in ROOT.glob("resource_manager/**/*.py"):
        if path.name in NEVER_ONE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            for before, text in zip(node.values, node.values[1:], strict=False):
                is_text = isinstance(before, ast.FormattedValue) and isinstance(text, ast.Constant)
                if is_text and NOUNS.match(str(text.value)):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: …{text.value!r}")
    assert not wrong
