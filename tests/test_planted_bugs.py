"""The bugs that `make mutants` plants: their places are there, and the mutators do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutations
from tests.planted_bugs import LUA, SQL, by_hand, of_lua, of_sql, text_of
from tests.planting import ROOT

SCRIPT = """local now = time[1] + 1
if holder ~= token and now <= 0 then
  redis.call('SET', lock, token, 'PX', life)
  return
end
"""
QUERY = '''"""A docstring: SELECT WHERE."""
sql = f"UPDATE {{t}} SET a = :a, b = 0 WHERE n = :n AND (x < :x OR y IS NULL) ORDER BY v LIMIT 1{end}"
'''
MODULE = """class A:
    def f(self, x):
        if x.a and x.b > 1:
            self.g(x)
        return [y for y in x if y.c]
"""


def changes(text: str, mutants: list[mutations.Mutant]) -> list[str]:
    """Return the lines that are another one in each mutant."""
    before = text.splitlines()
    lines = (line for mutant in mutants for line in mutant.text.splitlines())
    return [line.strip() for line in lines if line and line not in before]


def test_every_planted_bug_has_its_place_in_the_code_and_changes_it() -> None:
    bugs = [*by_hand(), *of_sql(), *of_lua()]
    assert [bug.name for bug in bugs if bug.text == text_of(bug.file)] == []
    assert {
        test for bug in bugs for test in bug.tests if not (ROOT / test.partition("::")[0]).exists()
    } == set()
    assert len({(bug.file, bug.name, bug.tests) for bug in bugs}) == len(bugs)


def test_every_script_and_every_module_with_statements_is_planted() -> None:
    assert set(LUA) == {path.stem for path in (ROOT / "resource_manager/storage/redis/lua").iterdir()}
    modules = {str(path.relative_to(ROOT / "resource_manager").with_suffix("")) for path in with_statements()}
    assert modules == set(SQL)


def with_statements() -> list[Path]:
    paths = [
        *(ROOT / "resource_manager/storage/sql").glob("*.py"),
        ROOT / "resource_manager/rest/sql_persistence.py",
    ]
    return [path for path in paths if mutations.sql(path.read_text())]


def test_mutants_of_a_script() -> None:
    assert changes(SCRIPT, mutations.lua(SCRIPT)) == [
        "local now = time[1] - 1",
        "local now = time[1] + 0",
        "if false then",
        "if true then",
        "if holder == token and now <= 0 then",
        "if holder ~= token or now <= 0 then",
        "if holder ~= token and now < 0 then",
        "if holder ~= token and now <= 1 then",
        "redis.call('SET', lock, token)",
    ]
    dropped = [mutant.name for mutant in mutations.lua(SCRIPT) if mutant.name.startswith("dropped")]
    assert dropped == ["dropped: redis.call('SET', lock, token, 'PX', life)", "dropped: return"]


def test_mutants_of_a_statement() -> None:
    after = [
        line.partition("SET ")[2].removesuffix('{end}"') for line in changes(QUERY, mutations.sql(QUERY))
    ]
    assert after == [
        "a = :a WHERE n = :n AND (x < :x OR y IS NULL) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE 1 = 1 AND (x < :x OR y IS NULL) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE n = :n OR (x < :x OR y IS NULL) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE n = :n AND (1 = 0 OR y IS NULL) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE n = :n AND (x <= :x OR y IS NULL) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE n = :n AND (x < :x AND y IS NULL) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE n = :n AND (x < :x OR 1 = 0) ORDER BY v LIMIT 1",
        "a = :a, b = 0 WHERE n = :n AND (x < :x OR y IS NULL) ORDER BY v DESC LIMIT 1",
        "a = :a, b = 0 WHERE n = :n AND (x < :x OR y IS NULL) ORDER BY v LIMIT 0",
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    {
        "drop self.g": "pass",
        "false x.a": "if False and x.b > 1:",
        "false x.a and": "if False:",
        "true y.c": "return [y for y in x if True]",
        "swap x.b": "if x.a and x.b >= 1:",
        "without x.a and ": "if x.b > 1:",
        "in x -> in []": "return [y for y in [] if y.c]",
    }.items(),
)
def test_a_change_of_a_function(change: str, line: str) -> None:
    changed = mutations.python(MODULE, "A.f", change)
    assert changes(MODULE, [mutations.Mutant("", changed)]) == [line]


def test_a_change_without_its_place_is_an_error() -> None:
    for function, change in (("A.h", "drop self.g"), ("A.f", "drop self.h"), ("A.f", "no words -> x")):
        with pytest.raises((StopIteration, ValueError)):
            mutations.python(MODULE, function, change)
