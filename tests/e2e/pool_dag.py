"""Source of a DAG whose tasks have a pool, in the shapes in which Airflow's own example DAGs write tasks."""

import ast
import builtins
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

from tests.builders import present

HOMES = ("airflow.example_dags", "airflow.providers.standard.example_dags")
OPERATORS = {
    "BashOperator": "airflow.providers.standard.operators.bash",
    "EmptyOperator": "airflow.providers.standard.operators.empty",
    "BashSensor": "airflow.providers.standard.sensors.bash",
    "TimeDeltaSensor": "airflow.providers.standard.sensors.time_delta",
    "PythonOperator": "airflow.providers.standard.operators.python",
}
HEAD = '''"""Tasks that share a pool."""

from __future__ import annotations

import datetime
import os
from datetime import timedelta

from airflow.sdk import DAG, task
{imports}

POOL = "gpu"  # one slot for each GPU

with DAG(
    "pool_of_tasks",
    schedule=None,
    catchup=False,
    params={{"my_param": "x"}},
    default_args={{"retries": 2, "retry_delay": timedelta(seconds=1)}},
) as dag:
'''
POOLS = (
    'pool="gpu"',
    "pool = 'gpu', pool_slots=2",
    "\n        pool=POOL,  # shared\n",
    'pool="gpu",\n        pool_slots=1',
)


def shapes():
    """Return calls of operators in the examples -> their task id; only those that end, of known names."""
    found = {}
    for home in HOMES:
        for path in sorted(
            Path(present(present(find_spec(home)).submodule_search_locations)[0]).glob("*.py")
        ):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                known = {*OPERATORS, *vars(builtins), "datetime", "timedelta", "os"}
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                segment = ast.get_source_segment(source, node) or ""
                is_short = not any(word in segment for word in ("sleep", "exit ", ".plugins."))
                if node.func.id in OPERATORS and names <= known and is_short:
                    given = {word.arg: ast.get_source_segment(source, word.value) for word in node.keywords}
                    if "task_id" in given and "trigger_rule" not in given:
                        found[segment] = given["task_id"]
    return found


def source(tasks=300):
    """Return the source of such a DAG with so many tasks, and three that cannot be rewritten."""
    every, lines = shapes(), []
    for number, (segment, task_id) in enumerate(islice(cycle(every.items()), tasks)):
        call = segment.replace(task_id, f'"task_{number}"', 1)
        pool = POOLS[number % len(POOLS)]
        at = call.index("(") + 1
        if number % 3:  # as the last argument
            end = call.rindex(")")
            body = call[:end].rstrip()
            call = f"{body}{'' if body.endswith((',', '(')) else ','} {pool.rstrip(chr(10))}\n    )"
        else:
            call = f"{call[:at]}{pool}{'' if pool.endswith(chr(10)) else ', '}{call[at:]}"
        lines.append(f"    t{number} = {call}\n")
    imports = "\n".join(f"from {home} import {name}" for name, home in OPERATORS.items())
    rest = (
        '    later = EmptyOperator(task_id="later")\n    later.pool = "gpu"\n'
        '    @task.bash(pool="gpu")\n    def greet():\n        return "echo hello"\n\n    greet()\n'
        '    EmptyOperator(task_id="computed", pool=os.environ.get("POOL", "gpu"))\n'
    )
    return HEAD.format(imports=imports) + "".join(lines) + rest
