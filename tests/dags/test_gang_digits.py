"""Training of the example gang: several processes on one machine that end with the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.stack import free_ports

JOB = Path(__file__).parents[2] / "dags" / "jobs" / "gang_digits.py"


@pytest.mark.parametrize("members", [pytest.param(1, marks=pytest.mark.e2e), 3])
def test_all_members_of_the_example_train_one_model(members):
    [port] = free_ports(1)
    processes = [
        subprocess.Popen(
            [sys.executable, str(JOB), "--epochs", "2"],
            env={
                **os.environ,
                "GPU_NODE_RANK": str(rank),
                "GPU_NODES_NUM": str(members),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(members)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * members
    result = json.loads(outputs[0].splitlines()[-1])
    assert result["accuracy"] > 0.85
    assert [member["rank"] for member in result["members"]] == list(range(members))
    assert len({member["checksum"] for member in result["members"]}) == 1
