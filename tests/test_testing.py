"""Pytest plugin for authors of DAGs: the page about it in a project of its own, and the launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resource_manager.jobs.launchers import Job, JobState, JobStatus, Launcher, LauncherError
from resource_manager.jobs.launchers.fake import FakeLauncher

PAGE = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()
DAG, TESTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[COMMANDS] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)

MORE_TESTS = """
import pytest


@pytest.fixture
def gpu_inventory(tmp_path):
    servers = tmp_path / "servers.toml"
    servers.write_text("[[servers]]\\nname = 'box'\\ngpus = 4\\ncpus = 32\\n")
    return servers


def test_a_job_is_stopped_after_its_timeout(gpu_launcher, gpu_manager):
    from more import slow

    gpu_launcher.runs()
    assert slow.test().state == "failed"
    [job] = gpu_launcher.stopped
    assert job.labels["task_id"] == "slow"
    assert job.environment["GPU_SERVER"] == "box"
    assert gpu_manager.leases() == []


def test_a_task_that_gets_no_gpus_gives_up(gpu_launcher, gpu_manager):
    from more import slow

    gpu_manager.allocate_resources("other", 4, 1)
    assert slow.test().state == "failed"
    assert gpu_launcher.jobs == []
    assert [lease["task_id"] for lease in gpu_manager.leases()] == ["other"]
    assert gpu_manager.queue() == []
"""
MORE_DAGS = """
from datetime import timedelta

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator

with DAG("slow", schedule=None) as slow:
    limits = {"execution_timeout": timedelta(milliseconds=200), "max_wait": timedelta(milliseconds=200)}
    GPUTrainingOperator(task_id="slow", gpus=4, image="ours", **limits)
"""


@pytest.mark.e2e
def test_the_page_is_true_in_a_project_of_its_own(tmp_path: Path) -> None:
    for name, text in {
        "dags/train.py": DAG,
        "dags/more.py": MORE_DAGS,
        "tests/test_train.py": TESTS,
        "tests/test_more.py": MORE_TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTEST"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e"],
        input=COMMANDS,
        cwd=tmp_path,
        env={**own, "PATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_start_of_pytest_imports_neither_airflow_nor_the_manager() -> None:
    code = (
        "import pytest, sys; before = set(sys.modules); import resource_manager.testing; "
        "print(*sorted(name for name in set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["resource_manager", "resource_manager.lazy", "resource_manager.testing"]


def job(key: str, command: str, **more: object) -> Job:
    return Job(key, ("/bin/sh", "-c", command), **more)  # type: ignore[arg-type]


def test_the_launcher_ends_jobs_as_it_was_told_last() -> None:
    fake = FakeLauncher()
    launcher: Launcher = fake
    fake.runs("train", output="one\n")
    fake.ends("train.py", exit_code=3, output="é\n")
    for key, command in (("a", "python train.py"), ("b", "train"), ("c", "other")):
        launcher.start(job(key, command, gpu_ids=(4, 5)))
        launcher.start(job(key, command))
    assert [each.key for each in fake.jobs] == ["a", "b", "c"], "the second start changes nothing"
    assert fake.jobs[0].environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    states = [launcher.status(key) for key in "abcd"]
    assert states == [
        JobStatus(JobState.FINISHED, 3),
        JobStatus(JobState.RUNNING),
        JobStatus(JobState.FINISHED, 0),
        JobStatus(JobState.ABSENT),
    ]
    text, offset, *_ = launcher.logs("a")
    assert (text, launcher.logs("a", offset)[:2]) == ("é\n", ("", offset))
    for key in "aabd":
        launcher.stop(key)
        assert launcher.status(key).state is JobState.ABSENT
    assert [each.key for each in fake.stopped] == ["b"], "the others had ended"
    assert launcher.logs("b")[:2] == ("", 0)


@pytest.mark.parametrize(("kind", "image"), [("local", "ours"), ("ssh", "ours"), ("docker", "")])
def test_the_launcher_refuses_what_the_real_one_refuses(kind: str, image: str) -> None:
    with pytest.raises(LauncherError, match="image"):
        FakeLauncher().start(job("a", "true", image=image, labels={"launcher": kind}))
