"""The list of planted bugs, which `make mutants` plants: it follows the code."""

from __future__ import annotations

from tests.planted_bugs import BUGS, ROOT


def test_the_code_has_the_place_of_every_planted_bug() -> None:
    texts = {bug.file: (ROOT / bug.file).read_text() for bug in BUGS}
    assert [(bug.file, bug.right) for bug in BUGS if bug.right not in texts[bug.file]] == []
    assert not [bug for bug in BUGS if bug.right == bug.wrong]
