"""What the stores in a database need besides this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OLD = '__version__ = "1.4.54"\n'
WITHOUT_LIBPQ = 'raise ImportError("no pq wrapper available.\\nAttempts made: none")\n'


@pytest.mark.parametrize(
    ("package", "source", "words"),
    [
        ("sqlalchemy", OLD, ["SQL stores need SQLAlchemy 2, and an older one is installed", "redis:// URL"]),
        ("psycopg", WITHOUT_LIBPQ, ["no pq wrapper available. Attempts made: none", "pip install"]),
    ],
)
def test_a_package_that_does_not_serve_is_named_with_what_to_do(
    tmp_path: Path, package: str, source: str, words: list[str]
) -> None:
    """Airflow 3.0 requires SQLAlchemy 1.4, without `Engine` at its top; psycopg may be without a libpq."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(source)
    command = "from resource_manager.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", command, "--store", "postgresql://ada@127.0.0.1:1/gpus", "status"],
        env={"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = ran.stderr.strip().splitlines()
    assert all(each in line for each in words), line
