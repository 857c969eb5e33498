"""Jobs that Slurm runs, with a directory each; standard library only, as this is sent to a login node.

`<root>/<key>/`, on the file system that login node and nodes share, has `script` (what Slurm runs), `run`
(the command with its environment), `submitted` (Slurm's job id), `begun/` (made at once by the one job that
may run), `log`, and `exit_code` once the command has ended. Slurm says what runs; the files say what became
of it. A job of this name that is submitted a second time waits for the first (`--dependency=singleton`),
finds `begun/` or the tombstone, and ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from resource_manager.jobs.launchers import directory_job as folder
from resource_manager.jobs.launchers import slurm_commands as slurm
from resource_manager.jobs.launchers import slurm_script

KILL_TIMEOUT_S = 45.0
POLL_S = 0.5
MAX_LOOK_BYTES = 4 * 1024 * 1024
ENDED_JOBS = "ended_jobs"
MAX_ENDED_BYTES = 1024 * 1024


def cluster() -> str:
    """Return what stands for the machine of a job's place: the cluster, which has several login nodes."""
    return f"slurm/{slurm.output_of('scontrol', 'show', 'config').partition('ClusterName')[2].split()[1]}"


def prepare(root: str, key: str, port: int = 0) -> dict[str, Any]:
    """Make the job's directory as `directory_job.prepare` does; a port of its nodes cannot be tried here."""
    _refuse_ended(root, key)
    found = folder.prepare(root, key)
    others = [name for name in running(root)["running"] if name != key]
    return {**found, "machine": cluster(), "running": others}


def start(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    options: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    nodes: int = 1,
    gpus: int = 0,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Submit the job with these options of sbatch, unless it was submitted before.

    `about` is kept for those who list the jobs. Raises `NotStartedError` with Slurm's own sentence if it does
    not take the job; after any other error it is unknown whether it runs.
    """
    _refuse_ended(root, key)
    directory = folder.directory_of(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with _one_at_a_time(directory):
        if folder.exists(os.path.join(directory, "submitted")) or folder.exists(
            os.path.join(directory, "begun")
        ):
            return
        if earlier := _own_or_refused(directory, key):
            _note_submitted(directory, earlier["id"])
            return
        if any(job["where"] == directory for job in slurm.accounted(key)):
            return
        comment = str((about or {}).get("lease_id", key))
        try:
            slurm_script.write_program(root, key, command, environment, files or {}, nodes, gpus)
            folder.write_file(os.path.join(directory, "about"), json.dumps(dict(about or {})))
            submitted = slurm.submit(key, directory, [*options, f"--nodes={nodes}"], comment)
        except (OSError, ValueError, slurm.RejectedError) as error:
            folder.remove(root, key)
            raise folder.NotStartedError(str(error)) from error
        _note_submitted(directory, submitted)


def status(root: str, key: str) -> dict[str, Any]:
    """Return the status as `directory_job.status` does, with "slurm": what Slurm says of the job, or None."""
    return _status(root, key, slurm.queue(key))


def look(root: str, offsets: Mapping[str, int]) -> dict[str, Any]:
    """Return {"jobs": {key: as `logs` does}} by one question to Slurm; an offset below 0: no text."""
    queue = slurm.queue()
    size = min(folder.LOG_CHUNK_BYTES, MAX_LOOK_BYTES // max(1, len(offsets)))
    jobs = {}
    for key, offset in offsets.items():
        found = _status(root, key, [job for job in queue if job["name"] == key])
        text = {"text": "", "offset": offset}
        if offset >= 0:
            text = folder.log_from(root, key, offset, found["state"] == "running", size)
        jobs[key] = {**text, "status": found}
    return {"jobs": jobs}


def _status(root: str, key: str, listed: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    directory = folder.directory_of(root, key)
    found: dict[str, Any] = {
        "state": "absent",
        "exit_code": None,
        "ended_at": None,
        "checkpoint_at": folder.modified_at(
            os.path.join(folder.own_directory_of(root, key), folder.CHECKPOINT)
        ),
        "preempted": folder.exists(folder.told_file_of(root, key)),
        "slurm": None,
    }
    own = [job for job in listed if job["where"] == directory]
    known = _id_of(directory)
    job = next((each for each in own if each["id"] == known), own[0] if own else None)
    exit_code = folder.number_in(directory, "exit_code")
    if job is not None and exit_code != 0:
        return {**found, "state": "running", "slurm": {**_described(job), **_granted(directory)}}
    if known is None and exit_code is None:
        return found
    ended = slurm.ended_job(known) if known else {}
    if exit_code != 0 and slurm.state_word(ended) in slurm.LIVE:
        return {
            **found,
            "state": "running",
            "slurm": {**_described({"id": known or "", **ended}), **_granted(directory)},
        }
    if exit_code is None:
        exit_code = slurm.exit_code_of(ended)
    ended_at = folder.modified_at(os.path.join(directory, "exit_code")) or slurm.time_of(
        ended.get("ends_at", "")
    )
    said = {**_described({"id": known or "", **ended}), **_granted(directory)}
    return {**found, "state": "finished", "exit_code": exit_code, "ended_at": ended_at, "slurm": said}


def logs(root: str, key: str, offset: int = 0) -> dict[str, Any]:
    """Return the output from byte `offset` on, as `directory_job.logs` does."""
    found = status(root, key)
    return {**folder.log_from(root, key, offset, found["state"] == "running"), "status": found}


def tail(root: str, key: str, size: int) -> dict[str, Any]:
    """Return the last `size` bytes of the output."""
    return folder.tail(root, key, size)


def terminate(root: str, key: str, grace_s: float = 10.0) -> None:
    """End the job, pending or running: SIGTERM to its command, SIGKILL to all of it after `grace_s`.

    Raises `RuntimeError` while Slurm does not say that it is gone, as on a node that is down.
    """
    directory = folder.directory_of(root, key)
    if grace_s > 0 and _own(directory, key):
        slurm.cancel(_own(directory, key), "TERM")
        _wait_until(lambda: not _own(directory, key), grace_s)
    if left := _own(directory, key):
        slurm.cancel(left, "KILL")
        if not _wait_until(lambda: not _own(directory, key), KILL_TIMEOUT_S):
            raise RuntimeError(f"Slurm still has job {left[0]['id']} ({key}) in state {left[0]['state']}")


def preempt(
    root: str, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0
) -> dict[str, Any]:
    """Tell the job once that it has to end, and end it when `grace_s` is over, as `directory_job.preempt`."""
    told = folder.told_file_of(root, key)
    found = status(root, key)
    if found["state"] == "running" and not folder.exists(told):
        os.makedirs(os.path.dirname(told), mode=0o700, exist_ok=True)
        folder.write_file(told, "", dated=time.time() + grace_s)
        directory = folder.directory_of(root, key)
        with suppress(OSError):
            folder.write_grace(os.path.join(directory, folder.PREEMPTED), grace_s)
        slurm.cancel(_own(directory, key), signal_name)
        found = status(root, key)
    deadline = time.monotonic() + wait_s
    while found["state"] == "running":
        kill_at = folder.modified_at(told)
        if kill_at is not None and time.time() >= kill_at:
            terminate(root, key, 0.0)
        elif time.monotonic() >= deadline:
            break
        else:
            time.sleep(POLL_S)
        found = status(root, key)
    return found


def stop(root: str, key: str, grace_s: float = 10.0) -> None:
    """End the job as `terminate` does, and remove its directory; its tombstone comes first."""
    folder.bury(root, key)
    terminate(root, key, grace_s)
    with suppress(FileNotFoundError):  # no job was there, or another process has just stopped it
        if record := _record(root, key, []):
            _note_ended(root, record)
    folder.remove(root, key)


def running(root: str, user: str = "") -> dict[str, Any]:
    """Return {"running": the jobs of this root that Slurm has}; raises as `directory_job.running` does."""
    base = folder.folder_of(root, user)
    return {
        "running": [job["name"] for job in slurm.queue() if job["where"] == os.path.join(base, job["name"])]
    }


def current(root: str, lease: str) -> dict[str, Any]:
    """Return {"key": of the job of that lease id that is there, else of its next one}.

    `lease` is a key up to its fencing token, which counts the jobs of a lease id here.
    """
    there = sorted(_token(name, lease) for name in folder.jobs_in(root) if _token(name, lease))
    if there:
        return {"key": f"{lease}{there[-1]}"}
    with suppress(FileNotFoundError):
        there = sorted(
            _token(name, lease) for name in os.listdir(os.path.dirname(folder.tombstone_of(root, "x")))
        )
    return {"key": f"{lease}{(there[-1] if there else 0) + 1}"}


def records(root: str, since: float = 0.0) -> dict[str, Any]:
    """Return {"cluster": its name, "records": what is known of each job that is here or has ended since}."""
    queue = slurm.queue()
    keys = [
        key
        for key in folder.jobs_in(root)
        if folder.exists(os.path.join(folder.directory_of(root, key), "about"))
    ]
    found = {each["key"]: each for each in _ended_jobs(root) if each["ended_at"] >= since}
    for key in keys:
        with suppress(FileNotFoundError):  # it was removed just now
            if record := _record(root, key, [job for job in queue if job["name"] == key]):
                found[key] = record
    return {"records": list(found.values()), "cluster": cluster()}


def _record(root: str, key: str, listed: Sequence[Mapping[str, str]]) -> dict[str, Any] | None:
    """Return what is known of a job, None before it was submitted; raises `FileNotFoundError`."""
    directory, found = folder.directory_of(root, key), _status(root, key, listed)
    about = json.loads(folder.whole_text_of(os.path.join(directory, "about")))
    if found["slurm"] is None:
        return None
    began_at = None
    with suppress(FileNotFoundError):
        began_at = slurm.time_of(folder.text_of(os.path.join(directory, "begun", "at")))
    return {
        **about,
        **found["slurm"],
        "key": key,
        "exit_code": found["exit_code"],
        "submitted_at": folder.modified_at(os.path.join(directory, "submitted")),
        "started_at": began_at,
        "ended_at": None if found["state"] == "running" else found["ended_at"] or time.time(),
    }


def _note_ended(root: str, record: Mapping[str, Any]) -> None:
    """Add a job that has ended to the list of these, of which the older half goes when it is long."""
    path = os.path.join(os.path.dirname(folder.directory_of(root, "x")), ENDED_JOBS)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell() > MAX_ENDED_BYTES:
            file.seek(0)
            lines = file.readlines()
            file.truncate(0)
            file.writelines(lines[len(lines) // 2 :])
        file.write(json.dumps(dict(record)) + "\n")


def _ended_jobs(root: str) -> Iterator[dict[str, Any]]:
    path = os.path.join(os.path.dirname(folder.directory_of(root, "x")), ENDED_JOBS)
    with suppress(FileNotFoundError), open(path) as file:
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


def _described(job: Mapping[str, str]) -> dict[str, Any]:
    """Return what is told of a job: id, state in one word, reason, expected or real start, partition."""
    return {
        "id": job.get("id", ""),
        "state": slurm.state_word(job),
        "reason": "" if job.get("reason") in ("None", None) else job["reason"],
        "begins_at": slurm.time_of(job.get("begins_at", "")),
        "partition": job.get("partition", ""),
    }


def _granted(directory: str) -> dict[str, Any]:
    text = ""
    with suppress(FileNotFoundError):
        text = folder.whole_text_of(os.path.join(directory, "begun", "granted"))
    return {"devices": slurm.parse_devices(text), "gpus_granted": slurm.parse_gpus(text)}


def _own_or_refused(directory: str, key: str) -> Mapping[str, str] | None:
    """Return the job of this name, if it is ours; raises `NotStartedError` if somebody took the name."""
    listed = slurm.queue(key)
    for job in listed:
        if job["where"] == directory:
            return job
    if listed:
        raise folder.NotStartedError(
            f"the name {key} is taken by job {listed[0]['id']} in {listed[0]['where']}: end it or rename it"
        )
    return None


def _own(directory: str, key: str) -> list[dict[str, str]]:
    return [job for job in slurm.queue(key) if job["where"] == directory]


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _refuse_ended(root: str, key: str) -> None:
    """Raise `AlreadyEndedError` if the job was stopped, `StillRunsError` while Slurm still has it."""
    folder.prune_tombstones(root)
    if not folder.exists(folder.tombstone_of(root, key)):
        return
    if _own(folder.directory_of(root, key), key):
        raise folder.StillRunsError(f"job {key} is being ended and still runs")
    raise folder.already_ended(key)


@contextmanager
def _one_at_a_time(directory: str) -> Iterator[None]:
    """Hold the lock of this directory's submission; raises `RuntimeError` where another process keeps it."""
    with open(os.path.join(directory, "lock"), "a") as lock:
        deadline = time.monotonic() + slurm.SUBMIT_TIMEOUT_S + folder.STARTER_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"another process holds {directory}/lock and does not submit"
                    ) from None
                time.sleep(0.05)
        yield


def _note_submitted(directory: str, job_id: str) -> None:
    folder.write_file(os.path.join(directory, "submitted"), f"{job_id}\n")


def _id_of(directory: str) -> str | None:
    """Return the id of the job that runs or ran here, else of the one that was submitted."""
    for name in (os.path.join("begun", "job"), "submitted"):
        with suppress(FileNotFoundError):
            if text := folder.text_of(os.path.join(directory, name)).strip():
                return text
    return None


def _token(name: str, lease: str) -> int:
    rest = name[len(lease) :] if name.startswith(lease) else ""
    return int(rest) if rest.isdigit() else 0


ACTS = (prepare, start, status, look, logs, tail, terminate, preempt, stop, running, current, records)
