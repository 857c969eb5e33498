"""Processor time of imports, as JSON in milliseconds: `python benchmarks/imports.py`.

Each is the best of five fresh processes, less the best of five that import what it is compared with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

RUNS = 5
CORE = "from resource_manager import GPUResourceManager"
DAG = "from airflow.sdk import DAG"
OPERATOR = "from airflow.sdk import DAG, BaseOperator"
IMPORTS = {
    "core": (CORE, ""),
    "redis": (f"{CORE}, RedisStore", ""),
    "service": ("from resource_manager.rest.app import create_app", ""),
    "simulator": ("import simulator.replay.command", ""),
    "names_for_dags": (f"{DAG}; import resource_manager.airflow", DAG),
    "operator": (f"{OPERATOR}; from resource_manager.airflow import GPUTrainingOperator", OPERATOR),
    "decorator": (f"{OPERATOR}; import resource_manager.airflow.decorators.gpu", OPERATOR),
    "airflow_alone": (OPERATOR, ""),
    "plugin": (
        "from airflow.plugins_manager import AirflowPlugin; import resource_manager.airflow.plugin",
        "from airflow.plugins_manager import AirflowPlugin",
    ),
}
"""Code whose time is asked, and the code it is compared with."""


def processor_ms(code: str) -> float:
    """Return the processor time of the quickest process that runs the code."""
    spent = []
    for _ in range(RUNS):
        before = os.times()
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        spent.append(sum(after[2:4]) - sum(before[2:4]))
    return 1000 * min(spent)


if __name__ == "__main__":
    codes = {code for pair in IMPORTS.values() for code in pair}
    alone = {code: processor_ms(code) for code in sorted(codes)}
    print(json.dumps({name: round(alone[code] - alone[base]) for name, (code, base) in IMPORTS.items()}))
