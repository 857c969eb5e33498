"""Times of allocate and release on the airflow:// store in a task: `python benchmarks/variable_store.py`.

It starts a separate Airflow (SQLite, standalone), runs one task that times 50 pairs, and prints JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from demo.stack import Stack, StackError

DAG = """
import time

from airflow.sdk import dag, task

from resource_manager import GPUResourceManager


@dag(schedule=None)
def time_variable_store():
    @task
    def measure():
        times = {"allocate": [], "release": []}
        with GPUResourceManager() as manager:
            for number in range(50):
                started = time.perf_counter()
                assert manager.allocate_resources(f"bench_{number}", 4, 32)
                middle = time.perf_counter()
                assert manager.release_resources(f"bench_{number}")
                times["allocate"].append(middle - started)
                times["release"].append(time.perf_counter() - middle)
        return {
            f"{name}_{label}_ms": round(1000 * sorted(found)[position], 1)
            for name, found in times.items()
            for label, position in (("p50", 25), ("p90", 45))
        }

    measure()


time_variable_store()
"""
TIMEOUT_S = 180.0


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpu-manager-bench-") as folder:
        dags = Path(folder) / "dags"
        dags.mkdir()
        (dags / "time_variable_store.py").write_text(DAG)
        with Stack(
            Path(folder) / "airflow", settings={"GPU_MANAGER_STORE": "airflow://"}, dags=dags
        ) as stack:
            run_id = stack.api.trigger("time_variable_store")
            deadline = time.monotonic() + TIMEOUT_S
            while (state := stack.api.run_state("time_variable_store", run_id)) not in {"success", "failed"}:
                if time.monotonic() > deadline:
                    raise StackError(f"the run is still {state}")
                time.sleep(1)
            if state == "failed":
                raise StackError(stack.api.log("time_variable_store", run_id, "measure"))
            print(json.dumps(stack.api.xcom("time_variable_store", run_id, "measure")))


if __name__ == "__main__":
    main()
