"""Starts of detached jobs: the directory, the shells between a start and its command, and what these know."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from resource_manager.jobs.directories import job_files
from resource_manager.jobs.directories.ending import refuse_ended, terminate
from resource_manager.jobs.directories.job_processes import processes_of
from resource_manager.jobs.directories.job_states import marked_in, status

SET_WITHIN = "GPU_JOB_ENVIRONMENT"
NOT_INHERITED = re.compile("_?AIRFLOW_(?!HOME$)|GPU_MANAGER_(?!NVML$)")
"""Variables of Airflow and the agent, keys and passwords among them, that their jobs do not inherit."""

# The outer shell exits at once, so that the job has no parent here. It looks for the tombstone when `stop`
# already sees it, so a start that was halted before starts nothing. If it cannot write `group`, as on a
# full disk, it starts nothing either, since a job without this file would be started twice. The file
# `begun` is for where somebody removes the directory. The inner shell writes the exit code, over blanks:
# the job may fill the disk. It traps the signals that end the job; a trapped signal is reset to its default
# in children. A job that is told before its command has begun does not begin: the command would not know of
# it.
WRAPPER = """
ended=$1 begun=$2; shift 2
[ ! -e "$ended" ] || exit
: > "$begun" && echo "    " > exit_code.new && echo $$ > group.new && mv group.new group || {
    rm -f "$begun"
    exit 1
}
(
    told=
    trap told=1 TERM INT HUP USR2
    directory=$PWD
    if [ "$told" ]; then (exit 143); else cd "$GPU_JOB_WORKING_DIR" && "$@"; fi
    echo $? 1<> "$directory/exit_code.new" && mv "$directory/exit_code.new" "$directory/exit_code"
) > log 2>&1 &
"""


def prepare(root: str, key: str, port: int = 0, walls: Sequence[str] = ()) -> dict[str, Any]:
    """Make the job's directory and test that a start can write there and that `port`, if any, is free.

    Returns {"running": the other jobs of this root that run}, the job's place as "machine", "folder",
    "mark" and "user", and as "walls" what `walls`, arguments of Python, say is missing for them. Raises
    `OSError`, or `RefusedError` for a job that was stopped.
    """
    refuse_ended(root, key)
    place = make_place(root, key)
    if port:
        check_port(port)
    others = {*job_files.jobs_in(root), *marked_in(place["folder"])} - {key}
    return {
        "running": [name for name in sorted(others) if status(root, name)["state"] == "running"],
        **place,
        "walls": _missing_for_walls(job_files.directory_of(root, key), walls) if walls else "",
    }


def make_place(root: str, key: str) -> dict[str, Any]:
    """Make the job's directory, and what its end needs on a disk that it may fill; return its place.

    It is "machine", "folder", "mark" and "user". Raises `OSError`.
    """
    directory = job_files.directory_of(root, key)
    folder = os.path.dirname(directory)
    for path in (directory, *(job_files.path_in(root, name) for name in job_files.OUTSIDE)):
        os.makedirs(path, mode=0o700, exist_ok=True)
    job_files.write_file(os.path.join(directory, job_files.PREPARED), "1\n")
    return {
        "machine": job_files.machine(),
        "folder": folder,
        "mark": job_files.mark_of(folder),
        "user": job_files.user_name(),
    }


def check_port(port: int) -> None:
    """Raise `OSError` if no process of this machine can be bound to the port."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections take no port
        try:
            probe.bind(("", port))
        except OSError as error:
            raise OSError(f"port {port} cannot be bound: {error.strerror}") from error


def _missing_for_walls(directory: str, walls: Sequence[str]) -> str:
    """Return why a job of this directory cannot have these walls, empty if it can."""
    tried = subprocess.run(
        [sys.executable, *walls],
        env={**os.environ, "GPU_JOB_LOCK": os.path.join(directory, "lock")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    said = (tried.stdout if tried.returncode == 0 else tried.stderr).decode("utf-8", "replace")
    return (said.strip().splitlines() or [""])[-1][: job_files.MAX_SHORT_BYTES]


def stage(root: str, key: str, program: str) -> dict[str, Any]:
    """Write a program into the job's prepared directory; return its {"path": …}."""
    refuse_ended(root, key)
    path = os.path.join(job_files.directory_of(root, key), "program")
    job_files.write_file(path, program)
    return {"path": path}


def start(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    working_dir: str = ".",
    files: Mapping[str, str] | None = None,
    walls: Sequence[str] = (),
) -> dict[str, Any]:
    """Start `command` in a new session, unless this job was started before; return {"began": whether not}.

    `walls` come before it, and the job's environment is set within them. Each of the variables in `files` has
    the path of a file with the text given there. Raises `NotStartedError` if no process of the job runs;
    after any other error it is unknown.
    """
    directory = job_files.directory_of(root, key)
    refuse_ended(root, key)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with job_files.lock_of_unstarted(directory) as lock:
            if lock is None:
                return {"began": False}
            if any(processes_of(directory)):
                raise RuntimeError(f"job {key} runs, but {directory} was removed: stop it")
            ended, begun = job_files.tombstone_of(root, key), job_files.begun_file_of(root, key)
            if job_files.exists(begun):
                return {"began": False}
            try:
                os.makedirs(os.path.dirname(begun), mode=0o700, exist_ok=True)
                inherited = {name: text for name, text in os.environ.items() if not NOT_INHERITED.match(name)}
                more = own_variables(root, key, files or {})
                more["GPU_JOB_WORKING_DIR"] = os.path.abspath(working_dir)
                started = subprocess.run(
                    ["/bin/sh", "-c", WRAPPER, "sh", ended, begun, *walls, *command],
                    cwd=directory,
                    env=process_environment(inherited, walls, environment, directory, more),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(lock,),
                    start_new_session=True,
                    stderr=subprocess.PIPE,
                )
            except (OSError, ValueError) as error:
                raise job_files.NotStartedError(str(error)) from error
    except OSError as error:
        if job_files.exists(os.path.join(directory, "lock")):
            raise
        refuse_ended(root, key)  # another process has just stopped the job
        raise job_files.NotStartedError(str(error)) from error
    if started.returncode != 0:
        terminate(root, key, 0.0)  # a signal may have ended the outer shell alone
        refuse_ended(root, key)
        reason = started.stderr.decode("utf-8", "replace").strip()
        raise job_files.NotStartedError(f"{directory} cannot be written: {reason}")
    return {"began": True}


def process_environment(
    inherited: Mapping[str, str],
    walls: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of the first process of a job in this directory, with `more` variables.

    These and its own are not the job's to choose. What builds the walls must not read the job's variables,
    by which it would run what the job names outside.
    """
    own = {
        **(more or {}),
        "GPU_PREEMPT_FILE": os.path.join(directory, job_files.PREEMPTED),
        "GPU_JOB_LOCK": os.path.join(directory, "lock"),
    }
    within = {**environment, **own}
    return {**inherited, **({**own, SET_WITHIN: json.dumps(within)} if walls else within)}


def own_variables(root: str, key: str, files: Mapping[str, str]) -> dict[str, str]:
    """Make the job's own directory and its files; return the variables that name them."""
    directory, own = job_files.directory_of(root, key), job_files.own_directory_of(root, key)
    os.makedirs(own, mode=0o700, exist_ok=True)
    paths = {variable: os.path.join(directory, variable.lower()) for variable in files}
    for variable, path in paths.items():
        job_files.write_file(path, files[variable])
    return {
        **paths,
        "GPU_JOB_DIR": own,
        "GPU_CHECKPOINT_FILE": os.path.join(own, job_files.CHECKPOINT),
        "GPU_PREEMPT_FILE": os.path.join(directory, job_files.PREEMPTED),
    }
