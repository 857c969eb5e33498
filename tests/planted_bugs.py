"""Plant bugs one by one, which tests must detect: in all of Lua and SQL, and where mutmut cannot."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests import mutations
from tests.planting import ROOT, field

BUSY = ["system_redis", "paused_past", "dead_holders", "long_held", "postgresql", "mariadb", "mysql"]
BUSY += ["running_jobs", "read_only"]
BUSY += [f"{kind}-{seed}" for kind in ("memory", "redis", "variable") for seed in range(2, 6)]
"""Parts of the names of tests to skip: they take long, or another test covers the same."""
QUICK = f"not {' and not '.join(BUSY)}"

CONTRACT, LOCKS = "storage/test_contract", "storage/redis/test_lock storage/test_locks"
MEMORY, JUMPS = "security/test_full_memory", "manager/commit/test_clock_jumps"
STORE = f"storage/redis/test_expiry {CONTRACT} storage/redis/test_faults {MEMORY}"
DATABASE = f"{CONTRACT} storage/sql/test_namespaces storage/sql/test_faults"


class Scope(NamedTuple):
    """The tests of a file of which all mutants are planted, and the stores under test."""

    tests: str
    stores: str = "sqlite"
    select: str = ""


LUA = {
    "begin_session": Scope(f"storage/redis/test_expiry rest/test_redis_persistence {MEMORY}"),
    "close_state": Scope(f"{CONTRACT} storage/test_backup {MEMORY}"),
    "commit": Scope(f"storage/redis/test_lock {STORE}"),
    "handover": Scope(f"{LOCKS} {STORE}"),
    "lock": Scope(f"{LOCKS} {MEMORY} {JUMPS}"),
    "may_flush": Scope(
        "storage/redis/test_client security/test_redis_rights storage/test_checks",
        select="not sqlite and not postgresql and not mariadb and not mysql",  # of Redis 7, too
    ),
    "once": Scope(STORE),
    "preflight": Scope(STORE),
    "put": Scope(f"storage/redis/test_client {STORE}"),
    "put_size": Scope(
        f"storage/redis/test_expiry {CONTRACT} {MEMORY}",
        select="has_an_end or counted_for_their_caller or begin_with_full_memory",
    ),
    "put_sighting": Scope(f"storage/redis/test_expiry {MEMORY}"),
    "refresh": Scope(STORE),
    "replace_state": Scope(f"{STORE} storage/test_backup"),
    "stream_bytes": Scope(STORE),
    "suspend": Scope(f"{STORE} {JUMPS}"),
}
SQL = {
    "rest/sql_persistence": Scope("storage/sql/test_namespaces rest/test_tokens security/test_login"),
    "storage/sql/check": Scope("storage/sql/test_namespaces"),
    "storage/sql/dialect": Scope(f"{DATABASE} storage/sql/test_lock storage/test_locks"),
    "storage/sql/expiring_rows": Scope(DATABASE),
    "storage/sql/lock": Scope(f"{DATABASE} storage/sql/test_lock storage/test_locks"),
    "storage/sql/mysql": Scope(DATABASE, stores="mariadb"),
    "storage/sql/postgresql": Scope(DATABASE, stores="postgresql"),
    "storage/sql/snapshots": Scope(DATABASE),
    "storage/sql/state_row": Scope(DATABASE),
    "storage/sql/store": Scope(DATABASE),
    "storage/sql/views": Scope("storage/sql/test_views"),
    "storage/sql/whole_state": Scope(f"{DATABASE} storage/test_backup"),
}


class Bug(NamedTuple):
    """A file that is another one, which a test must detect; of the mutants of a Scope some may survive."""

    file: str
    name: str
    text: str
    tests: tuple[str, ...]
    select: str = QUICK
    stores: str = ""


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def tests_of(names: str) -> tuple[str, ...]:
    """Return the files of tests, the tests and the folders of them that these words name."""
    return tuple(re.sub(r"/(test_\w+)", r"/\1.py", f"tests/{name}", count=1) for name in names.split())


def of_lua() -> Iterator[Bug]:
    for script, scope in LUA.items():
        file = f"resource_manager/storage/redis/lua/{script}.lua"
        for mutant in mutations.lua(text_of(file)):
            select = scope.select or f"{QUICK} and not sqlite"
            yield Bug(file, *mutant, tests_of(scope.tests), select, "embedded_redis")


def of_sql() -> Iterator[Bug]:
    for module, scope in SQL.items():
        file = f"resource_manager/{module}.py"
        for mutant in mutations.sql(text_of(file)):
            yield Bug(file, *mutant, tests_of(scope.tests), scope.stores, scope.stores)


def by_hand() -> Iterator[Bug]:
    """Return those of planted_bugs.txt: a module and its tests, then functions and what changes there."""
    file, tests = "", ""
    for line in text_of("tests/planted_bugs.txt").splitlines():
        name, _, rest = line.strip().partition(": ")
        if not line.startswith(" "):
            file, tests = (
                (name if name.startswith("simulator/") else f"resource_manager/{name}") + ".py",
                rest,
            )
        for change in rest.split(" | ") if line.startswith(" ") else ():
            try:
                text = mutations.python(text_of(file), name, change)
            except (StopIteration, ValueError) as error:
                raise ValueError(f"{file} has no place of {name}: {change}: follow it in the list") from error
            yield Bug(file, f"{name}: {change}", text, tests_of(tests))


def main(pattern: str = "") -> int:
    """Plant the bugs whose file and name match `pattern`; return 1 if one of those by hand survives."""
    bugs = [
        bug for bug in (*by_hand(), *of_sql(), *of_lua()) if re.search(pattern, f"{bug.file}: {bug.name}")
    ]
    survived: Counter[str] = Counter()
    passed, alive = set(), 0
    with field() as copy:
        for bug in bugs:
            if (bug.tests, bug.stores) not in passed:
                if failed := copy.verdict(bug.file, text_of(bug.file), bug.tests, bug.select, bug.stores):
                    print(f"{failed} fails without any planted bug: fix it first", file=sys.stderr)
                    return 2
                passed.add((bug.tests, bug.stores))
            finder = copy.verdict(bug.file, bug.text, bug.tests, bug.select, bug.stores)
            survived[bug.file] += not finder
            alive += not finder and not bug.stores
            print(f"{finder or 'SURVIVED'}: {bug.file}: {bug.name}", flush=True)
    for file, planted in Counter(bug.file for bug in bugs).items():
        print(f"{file}: {planted} planted, {survived[file]} survived")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
