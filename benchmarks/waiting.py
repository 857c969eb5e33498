"""How soon a freed GPU runs the next process in a real Airflow, and what 200 pending tasks cost.

It runs the two tests of tests/e2e/test_waiting.py that measure this, and prints their figures as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from xml.etree import ElementTree  # nosec B405

TESTS = "test_a_released_gpu_soon_runs_the_next_process or test_two_hundred_waiting_tasks"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/e2e/test_waiting.py", "-k", TESTS]
        options = ["-q", "--junit-xml", str(report), "-o", "junit_family=xunit1"]
        ran = subprocess.run([*command, *options], stdout=sys.stderr, check=False)
        if ran.returncode:
            sys.exit("the tests did not pass, so their figures count for nothing")
        recorded = {
            item.attrib["name"]: json.loads(item.attrib["value"])
            for item in ElementTree.parse(report).iter("property")  # nosec B314
        }
    figures = {
        name: {"p50": round(median(seconds), 1), "max": round(max(seconds), 1), "samples": len(seconds)}
        for name, seconds in recorded.items()
        if isinstance(seconds, list)
    }
    connections = recorded["redis_connections_of_the_triggerer"]
    json.dump({**figures, "redis_connections_of_the_triggerer": connections}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
