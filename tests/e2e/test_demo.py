"""Demo as `make demo` runs it, and the errors that it finds."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from demo.__main__ import main
from demo.timeline import holdings, overlaps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from simulator.replay.agreement import differences
from simulator.replay.history import read_history, workload_of
from simulator.replay.replay import Replay

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_demo_trains_seven_models_and_leaves_no_process(tmp_path):
    picture, history = tmp_path / "timeline.svg", tmp_path / "history.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--picture", str(picture), "--history", str(history)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("train_") > 12
    assert re.search(r"s  train_digits\.train_\dgpu_\d+cpu \w+ +waits\n", done.stdout)
    assert "GPUs: 32 free, 0 used, 0 closed of 32" in done.stdout
    assert re.search(r"train_gang\.train_together \w+ +on gpu-server-\d\S+ gpu-server-\d\S+\n", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert picture.read_text().startswith("<?xml")
    # A replay of the recorded history under the same policy reproduces every placement.
    replayed = Replay(
        workload_of(read_history(str(history)), "demo"), get_policy("first_fit"), get_order("fifo")
    )
    recorded = replayed.run()
    assert differences(recorded) == []
    assert sum(stay.started_at is not None for stay in recorded.job_runs.values()) == 7


@pytest.fixture
def interruptible():
    """Tests in the background of a script inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_up_leaves_no_folder_behind(number, exit_code, temporary_files, monkeypatch):
    class Quiet:
        """Stack without processes, so that only its folder could remain."""

        url = service_url = store_url = dags = "here"
        api = SimpleNamespace(login=("admin", "word"))

        def __init__(self, home, *, dags, api_port, service_port, settings, store):
            self.home = home

        def __enter__(self):
            (self.home / "airflow.log").write_text("")
            return self

        def __exit__(self, *reason):
            assert (self.home / "airflow.log").exists(), "the logs are there until all has stopped"

    monkeypatch.setattr("demo.__main__.Stack", Quiet)
    monkeypatch.setattr("demo.__main__.docker_answers", lambda: True)  # it waits by the same sleep
    monkeypatch.setattr("demo.__main__.time.sleep", lambda seconds: os.kill(os.getpid(), number))
    done = CliRunner().invoke(main, ["up"])
    assert (done.exit_code, done.stdout.endswith("stopped\n")) == (exit_code, exit_code == 0)
    assert list(temporary_files.iterdir()) == []


def test_a_gpu_held_twice_is_found():
    history = [
        granted("a", 1, "s0", [0, 1], 10.0),
        granted("b", 2, "s0", [1, 2], 11.0),
        {"change": "released", "lease_id": "a", "fencing_token": 1, "at": 12.0},
    ]
    held = holdings(history)
    assert [(item.name, item.granted_at, item.released_at) for item in held] == [
        ("a", 10.0, 12.0),
        ("b", 11.0, None),
    ]
    spans = [
        (item.name, item.server, item.gpu_ids, item.granted_at, item.released_at or 99.0) for item in held
    ]
    assert overlaps(spans) == ["GPU 1 of s0 was allocated to a and b at once"]
    assert overlaps([spans[0], ("b", "s0", (1, 2), 12.0, 13.0), ("c", "s1", (1,), 11.0, 12.0)]) == []


def granted(task_id, token, node, gpu_ids, at):
    return {
        "change": "granted",
        "at": at,
        "lease": {
            "request": {"lease_id": task_id, "gpus": len(gpu_ids)},
            "members": [{"node": node, "gpu_ids": gpu_ids}],
            "fencing_token": token,
            "granted_at": at,
        },
    }
