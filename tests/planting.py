"""Run tests on a copy of the tree in which one file is another one: which test finds it?"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S, QUICK_LIMIT_S = 300, 20
"""Longest run of all tests of one bug, and of a quick one. Generous, as a timeout counts as a detection."""

THEIRS = (
    "pytest", "_pytest.terminal", "sqlalchemy.dialects.sqlite", "redis", "psycopg", "pymysql", "httpx",
    "yaml", "flask", "pydantic", "prometheus_client",
)  # fmt: skip
OURS = ("resource_manager.rest.assemble", "resource_manager.cli", "resource_manager.storage.sql.store")
"""What is imported once, as each run is a fork: the first always, the others where no module is changed."""


class Field:
    """A copy of the tree."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._finders: list[str] = []
        """The tests that found the last bugs, the latest first: they find many of their neighbours."""

    def verdict(self, file: str, text: str, tests: tuple[str, ...], select: str, stores: str = "") -> str:
        """Return the first test that fails with that text in the file, empty if none does."""
        if not file.endswith(".py"):
            sys.path[0] = str(self._folder)
            for module in OURS:
                import_module(module)
        elif "resource_manager" in sys.modules:
            raise RuntimeError(f"{file} is imported already")
        path = self._folder / file
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        self._runs += 1
        os.utime(path, (self._runs, self._runs))  # else the compiled text of a run before may pass for it
        try:
            quick = self._run(tests, select, stores, "not e2e and not thorough" if stores else "not e2e")
            return quick or (stores and self._run(tests, select, stores, "thorough and not e2e"))
        finally:
            path.write_text(before, encoding="utf-8")

    def _run(self, tests: tuple[str, ...], select: str, stores: str, marks: str) -> str:
        output = self._folder / "output"
        child = os.fork()
        if child == 0:
            self._test(output, tests, select, stores, marks)
        ends_at = time.monotonic() + LIMIT_S
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends_at:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # servers that a test which timed out left behind
        if ended[0] == 0:
            os.waitpid(child, 0)
            return f"no end after {LIMIT_S} s"
        code, told = os.waitstatus_to_exitcode(ended[1]), output.read_text(encoding="utf-8")
        if (code == 0 and " passed" in told) or (code == 5 and marks.startswith("thorough")):
            return ""
        if code in (0, 5):
            raise SystemExit(f"{' '.join(tests)} skips its tests here: pytest -rs says why")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", told, re.MULTILINE)
        if failed is None:
            return f"exit code {code}: {told[-500:]}"
        if "::" in failed[1]:
            self._finders = list(dict.fromkeys([failed[1], *self._finders]))[:3]
        return failed[1]

    def _test(self, output: Path, tests: tuple[str, ...], select: str, stores: str, marks: str) -> None:
        os.setsid()
        os.chdir(self._folder)
        sys.path[0] = str(self._folder)
        if stores:
            os.environ["STORES_UNDER_TEST"] = stores
        with output.open("w", encoding="utf-8") as told:
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
        limit_s = QUICK_LIMIT_S if stores else LIMIT_S
        arguments = [
            "-x",
            "-q",
            "--tb=no",
            "-pno:cacheprovider",
            "-m",
            marks,
            "-Wignore::pytest.PytestAssertRewriteWarning",
            f"--timeout={limit_s}",
            "-k",
            select,
        ]
        for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[module]  # they are those of the tree itself
        finders = [test for test in self._finders if test.partition("::")[0] in tests]
        code = 3
        try:
            code = int(import_module("pytest").main([*arguments, *finders, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextmanager
def field() -> Iterator[Field]:
    for module in THEIRS:
        import_module(module)
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        for part in ("resource_manager", "simulator", "tests", "docs"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", folder)
        os.environ["TMPDIR"] = name
        tempfile.tempdir = None
        yield Field(folder)
