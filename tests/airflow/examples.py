"""The example DAGs of the package, and the version of Airflow that each names in its docstring."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path

import resource_manager.airflow

EXAMPLES = sorted(Path(resource_manager.airflow.__file__).parent.glob("example_dags/example_*.py"))


def is_readable(example: Path) -> bool:
    """Return whether the installed Airflow is new enough for an example, by the example's own words."""
    found = re.search(r"Airflow 3\.(\d+) and later", ast.get_docstring(ast.parse(example.read_text())) or "")
    return int(version("apache-airflow").split(".")[1]) >= int(found[1] if found else 0)


def readable_examples() -> list[Path]:
    """Return the files of the examples for the installed Airflow."""
    return [example for example in EXAMPLES if is_readable(example)]
