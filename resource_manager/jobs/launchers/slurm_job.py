"""Jobs that Slurm runs, with a directory each; standard library only, as this is sent to a login node.

`<root>/<key>/`, on the file system that login node and nodes share, has `script` (what Slurm runs), `run`
(the command with its environment), `submitted` (Slurm's job id), `begun/` (made at once by the one job that
may run), `log`, `exit_code` once the command has ended, and `record` (what is listed of a job that has).
Slurm says what runs; the files say what became of it. A job of this name that is submitted a second time
waits for the first (`--dependency=singleton`), finds `begun/` or the tombstone, and ends. The other files,
and what the functions return and raise, are those of `jobs.directories`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from resource_manager.jobs.directories import calls, ending, job_files, starting
from resource_manager.jobs.directories.job_states import log_from, tail, unstarted
from resource_manager.jobs.launchers import slurm_commands as slurm
from resource_manager.jobs.launchers import slurm_script

KILL_TIMEOUT_S = 45.0
POLL_S = 0.5
MAX_LOOK_BYTES = 4 * 1024 * 1024
ENDED_JOBS = "ended_jobs"
MAX_ENDED_JOBS = 2000
UNKNOWN_S = 86_400.0
"""Time after which an end that Slurm does not know is no longer asked for: many sites have no accounts."""


def cluster() -> str:
    """Return what stands for the machine of a job's place: the cluster, which has several login nodes."""
    return f"slurm/{slurm.output_of('scontrol', 'show', 'config').partition('ClusterName')[2].split()[1]}"


def prepare(root: str, key: str) -> dict[str, Any]:
    """Make the job's directory."""
    ending.refuse_ended(root, key, _is_gone)
    found = starting.make_place(root, key)
    others = [name for name in running(root)["running"] if name != key]
    return {**found, "machine": cluster(), "running": others, "walls": ""}


def start(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    options: Sequence[str],
    files: Mapping[str, str],
    gpus: int,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Submit the job with these options of sbatch, unless it was before; return {"began": whether not}.

    `about` is kept for those who list the jobs. Raises `NotStartedError` with Slurm's own sentence if it does
    not take the job; after any other error it is unknown whether it runs.
    """
    ending.refuse_ended(root, key, _is_gone)
    directory = job_files.directory_of(root, key)
    starting.make_place(root, key)
    timeout_s = slurm.SUBMIT_TIMEOUT_S + job_files.STARTER_TIMEOUT_S
    with job_files.lock_of_unstarted(directory, ("submitted", "begun"), timeout_s) as lock:
        if lock is None:
            return {"began": False}
        named = slurm.queue(key)
        ids = [job["id"] for job in named if job["directory"] == directory]
        if named and not ids:
            raise job_files.NotStartedError(
                f"the name {key} is taken by job {named[0]['id']} in {named[0]['directory']}: "
                "end it or rename it"
            )
        begun = job_files.begun_file_of(root, key)
        if not ids and job_files.exists(begun):  # somebody has removed its directory
            return {"began": False}
        if not ids:
            try:
                slurm_script.write_program(root, key, command, environment, files, gpus)
                job_files.write_file(os.path.join(directory, "about"), json.dumps(about))
                job_files.write_file(os.path.join(directory, "record"), "")
                ids.append(slurm.submit(key, directory, options, about.get("task_id", key)))
            except (OSError, ValueError, slurm.RejectedError) as error:
                ending.remove(root, key)
                raise job_files.NotStartedError(str(error)) from error
        for path in (begun, os.path.join(directory, "submitted")):
            job_files.write_file(path, ids[0])
    return {"began": True}


def status(root: str, key: str) -> dict[str, Any]:
    """Return the status, with "slurm": what Slurm says of the job, or None."""
    return _status(root, key, slurm.queue(key))


def read_all(root: str, offsets: Mapping[str, int], since: float | None) -> dict[str, Any]:
    """Return {"jobs": {key: as `logs` does}, "cluster": its name, "records": of all jobs here}.

    All comes of one question to Slurm. An offset below 0: no text. The records are those of jobs that are
    here or have ended since; without `since` there are none.
    """
    queue, jobs = slurm.queue(), {}
    size = min(job_files.LOG_CHUNK_BYTES, MAX_LOOK_BYTES // max(1, len(offsets)))
    for key, offset in offsets.items():
        found = _status(root, key, queue)
        text = {"text": "", "offset": offset}
        if offset >= 0:
            text = log_from(root, key, offset, found["state"] == "running", size)
        jobs[key] = {**text, "status": found}
    if since is None:
        return {"jobs": jobs, "cluster": "", "records": []}
    records = {record["id"]: record for record in _ended_jobs(root) if record["ended_at"] >= since}
    for key in job_files.jobs_in(root):
        with suppress(FileNotFoundError, ValueError):  # it was removed just now, is not ours, or half written
            record = _record(root, key, queue)
            if record:
                records[record["id"]] = {**record, "uncollected": record["ended_at"] is not None}
    name = cluster().partition("/")[2]
    listed = [{**record, "cluster": name} for record in records.values()]
    return {"jobs": jobs, "cluster": name, "records": listed}


def logs(root: str, key: str, offset: int = 0) -> dict[str, Any]:
    """Return the output from byte `offset` on."""
    found = status(root, key)
    return {**log_from(root, key, offset, found["state"] == "running"), "status": found}


def terminate(root: str, key: str, grace_s: float = 10.0) -> None:
    """End the job, pending or running: SIGTERM to its command, SIGKILL to all of it after `grace_s`.

    Raises `RuntimeError` while Slurm does not say that it is gone, as on a node that is down.
    """
    directory = job_files.directory_of(root, key)
    for name, timeout_s in (("TERM", grace_s), ("KILL", KILL_TIMEOUT_S)):
        deadline = time.monotonic() + timeout_s
        if timeout_s > 0:
            slurm.signal(_own(directory), name)
        while True:
            left = _own(directory)
            if not left:
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
    raise RuntimeError(f"Slurm still has job {left[0]['id']} ({key}) in state {left[0]['state']}")


def preempt(
    root: str, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0
) -> dict[str, Any]:
    """Tell the job once that it has to end, and end it when `grace_s` is over."""

    def tell() -> None:
        slurm.signal(_own(job_files.directory_of(root, key)), signal_name)

    return ending.tell_and_end(root, key, grace_s, wait_s, POLL_S, tell, status, terminate)


def stop(root: str, key: str, grace_s: float = 10.0) -> dict[str, Any]:
    """End the job as `terminate` does, and remove its directory; its tombstone comes first.

    Returns {"ran": whether Slurm had it until then}.
    """
    ran = status(root, key)["state"] == "running"
    ending.bury(root, key, grace_s, terminate)
    terminate(root, key, grace_s)
    # No job was there, its login node lost its power, or it filled the disk: the list is for reports.
    with suppress(OSError, ValueError):
        record = _record(root, key, ())
        if record:
            _note_ended(root, record)
    ending.remove(root, key)
    return {"ran": ran}


def running(root: str, user: str = "") -> dict[str, Any]:
    """Return {"running": the jobs of this root that have not ended}."""
    base = job_files.folder_of(root, user)
    here = [job for job in slurm.queue() if os.path.dirname(job["directory"]) == base]
    return {"running": [job["name"] for job in here if not _is_over(job)]}


def current(root: str, lease: str) -> dict[str, Any]:
    """Return {"key": of the job of that lease id that is there, else of its next one}.

    `lease` is a key up to its fencing token, which counts the jobs of a lease id here.
    """
    there, ended = (
        [int(name[len(lease) :]) for name in names if name.startswith(lease) and name[len(lease) :].isdigit()]
        for names in (job_files.jobs_in(root), job_files.ended_in(root))
    )
    return {"key": f"{lease}{max(there) if there else max(ended, default=0) + 1}"}


def _record(root: str, key: str, queue: Sequence[Mapping[str, str]]) -> dict[str, Any] | None:
    """Return what is known of a job, None before it was submitted or without `about`.

    Raises `FileNotFoundError`.
    """
    directory = job_files.directory_of(root, key)
    record_file = os.path.join(directory, "record")
    exit_at = job_files.modified_at(os.path.join(directory, "exit_code"))
    has_left, seen_at = all(job["directory"] != directory for job in queue), time.time()
    if has_left:  # as many have that nobody collects: asking Slurm for each takes longer than an answer may
        with suppress(OSError, ValueError):
            record_of, record = json.loads(job_files.text_of(record_file, job_files.LOG_CHUNK_BYTES))
            if record_of == exit_at:  # else it was requeued and has ended once more
                is_known = record["state"] or record["exit_code"] is not None
                if is_known or record["ended_at"] < seen_at - UNKNOWN_S:
                    return dict(record)
                seen_at = record["ended_at"]  # the accounts may have been away
    about = json.loads(job_files.text_of(os.path.join(directory, "about"), job_files.LOG_CHUNK_BYTES))
    if not about:
        return None
    found, began_at = _status(root, key, queue), ""
    if found["slurm"] is None:
        return None
    with suppress(FileNotFoundError):
        began_at = job_files.text_of(os.path.join(directory, "begun", "at"))
    record = {
        **about,
        **found["slurm"],
        "source": "slurm",
        "key": key,
        "exit_code": found["exit_code"],
        "submitted_at": job_files.modified_at(os.path.join(directory, "submitted")),
        "started_at": slurm.time_of(began_at),
        "ended_at": None if found["state"] == "running" else found["ended_at"] or seen_at,
    }
    if has_left and record["ended_at"] is not None:
        # A new file might keep the folder from being removed now.
        with suppress(OSError), open(record_file, "r+") as file:
            file.write(json.dumps([exit_at, record]))
            file.truncate()
    return record


def _note_ended(root: str, record: Mapping[str, Any]) -> None:
    """Add a job that has ended to the list of these, of which the oldest go when it is long."""
    with open(os.path.join(os.path.expanduser(root), ENDED_JOBS), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        lines = file.readlines()
        if len(lines) > 2 * MAX_ENDED_JOBS:
            file.truncate(0)
            file.writelines(lines[-MAX_ENDED_JOBS:])
        file.write(json.dumps(record) + "\n")


def _ended_jobs(root: str) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError), open(os.path.join(os.path.expanduser(root), ENDED_JOBS)) as file:
        for line in file:
            with suppress(ValueError):  # its writer was killed
                yield json.loads(line)


def _status(root: str, key: str, queue: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    directory = job_files.directory_of(root, key)
    found: dict[str, Any] = {**unstarted(root, key), "slurm": None}
    known, granted = _id_of(directory), ""
    own = [job for job in queue if job["directory"] == directory]
    job = next((each for each in own if each["id"] == known), own[0] if own else None)
    if job is None and known is not None:
        job = slurm.known_job(known, directory)
    # After the word of Slurm, which may end the last run of a job that was requeued.
    exit_code = job_files.number_of(f"{directory}/exit_code")
    if job is None:
        return found if exit_code is None else {**found, "state": "finished", "exit_code": exit_code}
    with suppress(FileNotFoundError):
        granted = job_files.text_of(os.path.join(directory, "begun", "granted"), job_files.LOG_CHUNK_BYTES)
    found["slurm"] = slurm.described(job, granted)
    if exit_code != 0 and slurm.state_of(job) not in slurm.ENDS:
        return {**found, "state": "running"}
    ended_at = job_files.modified_at(os.path.join(directory, "exit_code"))
    return {
        **found,
        "state": "finished",
        "exit_code": slurm.exit_code_of(job) if exit_code is None else exit_code,
        "ended_at": ended_at or slurm.time_of(job.get("ends_at", "")),
    }


def _own(directory: str) -> list[dict[str, str]]:
    """Return the jobs of a directory that have not ended."""
    named = slurm.queue(os.path.basename(directory))
    return [job for job in named if job["directory"] == directory and not _is_over(job)]


def _is_over(job: Mapping[str, str]) -> bool:
    """Return whether a job that Slurm has is over, or was removed, and Slurm still cleans up its nodes."""
    directory = job["directory"]
    has_ended = not os.path.exists(directory) or job_files.number_of(f"{directory}/exit_code") is not None
    return job["state"] == "COMPLETING" and has_ended


def _is_gone(directory: str) -> bool:
    return not _own(directory)


def _id_of(directory: str) -> str | None:
    """Return the id of the job that runs or ran here, else of the one that was submitted."""
    root, key = os.path.split(directory)
    inside = (os.path.join(directory, name) for name in (os.path.join("begun", "job"), "submitted"))
    for path in (*inside, job_files.begun_file_of(root, key)):
        with suppress(FileNotFoundError):
            text = job_files.text_of(path).strip()
            if text:
                return text
    return None


def answer(call: dict[str, Any]) -> None:
    """Execute a remote call as `calls.answer` does."""
    acts = (prepare, start, status, read_all, logs, tail, terminate, preempt, stop, running, current)
    calls.answer(call, {act.__name__: act for act in acts}, cluster)
