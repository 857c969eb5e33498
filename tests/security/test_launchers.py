"""Launchers given paths and shell commands as names: all parts of a job stay data."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import job_states
from resource_manager.jobs.launchers import (
    Job,
    LauncherError,
    LauncherUnreachableError,
    build_docker_cmd,
    job_key,
    open_at,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.running_job import RunningJob
from tests.eventually import wait_until_ended
from tests.security import hostile
from tests.ssh_account import logged_in, run_command

ALL = (*hostile.NAMES, *hostile.UNPRINTABLE)


def said_in_the_end(launcher: Any, key: str) -> str:
    wait_until_ended(launcher, key)
    return str(launcher.logs(key)[0])


@pytest.mark.parametrize("task_id", ALL)
def test_a_job_key_is_safe_for_any_task_id(task_id: str, tmp_path: Path) -> None:
    key = job_key(task_id, 7)
    assert re.fullmatch(r"gpu-[A-Za-z0-9_.-]+", key)
    assert (tmp_path / key).resolve().parent == tmp_path.resolve()


def test_different_task_ids_have_different_job_keys() -> None:
    assert len({job_key(task_id, 1) for task_id in ALL}) == len(ALL)
    assert job_key("a", 1) != job_key("a", 11)


def test_arguments_and_environment_reach_the_job_unchanged(tmp_path: Path) -> None:
    """Start the job really: none of its texts is run, and no file appears outside its folder."""
    root = tmp_path / "jobs"
    launcher = LocalLauncher(str(root))
    texts = [*hostile.NAMES, *(text for text in hostile.UNPRINTABLE if "\0" not in text)]
    show = "import os, sys; print([sys.argv[1:], os.environ['EVIL']])"
    job = Job(
        job_key("../../evil; touch pwned", 1),
        (sys.executable, "-c", show, *texts),
        {"EVIL": "$(touch pwned)\n; touch pwned"},
    )
    launcher.start(job)
    printed = said_in_the_end(launcher, job.key)
    assert printed.strip() == str([texts, "$(touch pwned)\n; touch pwned"])
    launcher.stop(job.key)
    assert list(tmp_path.rglob("pwned")) == []
    assert not Path("pwned").exists()
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize(
    "environment", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0y"}, {"A\nLD_PRELOAD": "x"}]
)
def test_an_invalid_environment_variable_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LauncherError):
        LocalLauncher(str(tmp_path)).start(Job("k", ("true",), environment))
    with pytest.raises(LauncherError):
        build_docker_cmd(ALLOCATION, "image", env=environment)
    assert list(tmp_path.iterdir()) == []


def test_a_command_with_a_null_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="null"):
        LocalLauncher(str(tmp_path)).start(Job("k", ("echo", "a\0b")))


def test_a_job_cannot_select_devices_that_it_was_not_granted(tmp_path: Path) -> None:
    launcher = LocalLauncher(str(tmp_path))
    payload = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NVIDIA_VISIBLE_DEVICES": "all", "GPU_LEASE_GPUS": "0"}
    shown = "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES $GPU_LEASE_GPUS"
    launcher.start(Job("k", ("/bin/sh", "-c", shown), payload, gpu_ids=(5,)))
    assert said_in_the_end(launcher, "k") == "5 5 5\n"
    launcher.stop("k")


ALLOCATION = {"task_id": "t", "gpu_ids": (0, 1), "cpu_count": 4, "fencing_token": 3}


def words_that_docker_gets(command: str, folder: Path) -> list[str]:
    """Return the arguments that a real shell passes to a `docker` that only prints them."""
    docker = folder / "docker"
    docker.write_text(f"#!{sys.executable}\nimport sys\nprint(repr(sys.argv[1:]))\n")
    docker.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, env={"PATH": str(folder)}, capture_output=True, text=True
    )
    words: list[str] = eval(done.stdout)  # the repr of a list of strings, written a line above
    return words


@pytest.mark.parametrize("text", [text for text in ALL if "\0" not in text])
def test_every_word_of_docker_run_stays_one_argument(text: str, tmp_path: Path) -> None:
    command = build_docker_cmd(
        {**ALLOCATION, "task_id": text},
        "image:1",
        ["train", text],
        env={"EVIL": text},
        volumes=[f"/data:/{text}"],
    )
    words = words_that_docker_gets(command, tmp_path)
    assert words[-3:] == ["image:1", "train", text]
    assert words[words.index("--label") + 1] == f"gpu-manager.task_id={text}"
    assert f"EVIL={text}" in words
    assert words.count("--gpus") == 1
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("image", ["", *hostile.OPTIONS])
def test_an_image_that_reads_as_a_docker_option_is_refused(image: str) -> None:
    with pytest.raises(LauncherError, match="image"):
        build_docker_cmd(ALLOCATION, image)


def test_a_command_given_as_text_is_split_into_words_and_not_run_by_a_shell(tmp_path: Path) -> None:
    command = build_docker_cmd(ALLOCATION, "image", "echo a; touch pwned")
    assert words_that_docker_gets(command, tmp_path)[-4:] == ["echo", "a;", "touch", "pwned"]
    assert shlex.split(command)[-4:] == ["echo", "a;", "touch", "pwned"]


def test_ssh_sends_all_arguments_as_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the program for the server's python3 here, with every hostile text as an argument."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setenv("AIRFLOW_CONN_SERVER", '{"conn_type": "ssh", "host": "server"}')
        launcher = open_at(JobPlace("ssh", "server", "server"))
    commands = set()

    def act(channel: Any, command: str) -> None:
        commands.add(command)
        run_command(channel, command)

    monkeypatch.chdir(tmp_path)
    launcher._server._connect = lambda: logged_in(act)  # type: ignore[attr-defined]
    launcher.root = str(tmp_path / "jobs")  # type: ignore[attr-defined]
    texts = [text for text in ALL if "\0" not in text] + ["'''", '"""', "\\", "\\'", "é\U0001f600"]
    show = "import sys; print(sys.argv[1:])"
    job = Job(job_key("../x", 1), (sys.executable, "-c", show, *texts), {"EVIL": "'; import os"})
    launcher.start(job)
    assert said_in_the_end(launcher, job.key).strip() == str(texts)
    launcher.stop(job.key)
    launcher.close()
    [command] = commands
    assert command.startswith("python3 -I -S -c 'import os, sys; exec(")
    assert all(text not in command for text in (job.key, *texts) if len(text) > 2)
    assert list(tmp_path.rglob("pwned")) == []


@pytest.mark.parametrize("address", ["host:ssh", "host:99999999", "[::1", "-oProxyCommand=x:y"])
def test_an_invalid_address_is_an_error_in_one_line(address: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LauncherError) as caught:
            open_at(JobPlace("ssh", address))
    assert "\n" not in str(caught.value)


def lease_at(place: JobPlace) -> dict[str, Any]:
    """Return a lease whose owner says that its job is there."""
    member = {"rank": 0, "server_name": "a", "address": "real"}
    labels = {"key": "../..", "address": "evil"}
    lease = {"task_id": "../..", "fencing_token": 1, "labels": labels, "members": [member], "nodes": 1}
    return {**lease, "job_places": [asdict(place)]}


def test_a_lease_cannot_make_a_job_key_that_is_a_path(tmp_path: Path) -> None:
    """Only `job_key` makes the key of a lease's job; labels of the lease cannot name another job."""
    [job] = RunningJob.all_of(lease_at(JobPlace("ssh", "evil", machine="m")))
    assert job.key == job_key("../..", 1)
    assert job_states.status(str(tmp_path), job.key)["state"] == "absent"


def test_the_owner_of_a_lease_cannot_send_others_to_a_server_of_their_choice() -> None:
    """Reconciler and console log in with their own credentials, so only where the inventory says."""
    [job] = RunningJob.all_of(lease_at(JobPlace("ssh", "evil", machine="m")))
    assert job.place.address == "real"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of another user")
def test_a_folder_of_another_user_is_not_looked_at_whoever_asks(tmp_path: Path) -> None:
    """Its owner could write another's process group into it, to be killed by one with more rights."""
    victim = subprocess.Popen(["sleep", "60"], start_new_session=True)
    launcher = LocalLauncher(str(tmp_path))
    place = launcher.prepare(Job("gpu-x-00000000-1", ("true",)))
    job = tmp_path / "gpu-x-00000000-1"
    (job / "lock").touch()
    (job / "group").write_text(str(victim.pid))
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 65534, 65534)
    try:
        with pytest.raises(LauncherUnreachableError, match=r"of user .*ask from there, as that user"):
            open_at(place).stop("gpu-x-00000000-1", 0)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
