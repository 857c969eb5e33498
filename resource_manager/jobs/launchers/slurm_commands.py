"""Slurm's commands and what they say; standard library only, as `slurm_job`, which it is sent with.

The forms are plain columns, which versions give alike; `--json` differs from one to the next.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from resource_manager.jobs.directories.starting import NOT_INHERITED

COMMAND_TIMEOUT_S = 50.0
SUBMIT_TIMEOUT_S = 30.0

FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "begins_at": "%S",
    "partition": "%P",
    "directory": "%Z",
    "name": "%j",
}
"""What is asked of each job; the directory tells a job of ours from one that has its name."""

OUTAGES = re.compile(
    "Unable to contact|timed out|Zero Bytes|not connected|onnection |standby mode|temporarily|"
    "configuration source"
)
"""Parts of sbatch's errors after which the job may have been taken, or is taken a little later."""

WAITS = {
    "Resources": "it is next, and not enough is free",
    "Priority": "others are before it",
    "None": "Slurm has not looked at it yet",
    "Dependency": "a job of the same name has not ended",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "its owner holds it",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
    "QOSMaxGRESPerUser": "its user has all GPUs that the QOS allows a user",
    "QOSMaxJobsPerUserLimit": "its user has all jobs that the QOS allows a user",
    "QOSGrpGRES": "the QOS has all GPUs that it may have",
    "AssocGrpGRES": "its account has all GPUs that it may have",
    "AssocMaxJobsLimit": "its account has all jobs that it may have",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "Licenses": "a licence that it needs is in use",
}
"""Slurm's reasons of a wait in words; another reason is told as Slurm spells it."""

NEVER = {
    "PartitionTimeLimit": "its time is above the limit of the partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "PartitionConfig": "the partition does not take such a job",
    "BadConstraints": "no node can fulfil its constraints",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSNotAllowed": "its QOS is not allowed there",
    "AccountNotAllowed": "its account is not allowed in the partition",
    "AssocMaxWallDurationPerJobLimit": "its time is above the limit of its account",
    "QOSMaxWallDurationPerJobLimit": "its time is above the limit of the QOS",
    "QOSMaxGRESPerJob": "it asks for more GPUs than the QOS allows a job",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than the QOS allows a job",
    "AssocMaxNodePerJobLimit": "it asks for more nodes than its account may have in a job",
    "DependencyNeverSatisfied": "its dependency can never be fulfilled",
}
"""Reasons for which a job waits until somebody changes it or the cluster: the task fails."""

ENDS = {
    "PREEMPTED": "Slurm preempted the job",
    "NODE_FAIL": "a node of the job failed",
    "TIMEOUT": "Slurm ended the job at its time limit",
    "OUT_OF_MEMORY": "the job used more memory than it asked for",
    "CANCELLED": "the job was cancelled on Slurm",
    "DEADLINE": "Slurm ended the job at its deadline",
    "BOOT_FAIL": "a node of the job did not boot",
    "REVOKED": "another cluster of the federation took the job",
    "COMPLETED": "",
    "FAILED": "",
    "": "",
}
"""States of a job that has ended, with the words for ends that are Slurm's; an unknown state is empty."""


class RejectedError(Exception):
    """Slurm did not take the job, for the reason that it gives."""


def queue(key: str = "") -> list[dict[str, str]]:
    """Return the user's jobs that have not ended, all or those of that name."""
    form, user = "--format=" + "\t".join(FIELDS.values()), f"--user={os.geteuid()}"
    named = [f"--name={key}"] if key else []
    return rows(output_of("squeue", user, "--all", "--noheader", form, *named), "\t", *FIELDS)


def submit(key: str, directory: str, options: Sequence[str], comment: str) -> str:
    """Return the id of the new job; raises `RejectedError` if there is none, `RuntimeError` if unknown."""
    own = [
        "--parsable",
        f"--job-name={key}",
        f"--comment={comment}",
        f"--chdir={directory}",
        f"--output={directory.replace('%', '%%')}/log",
        "--open-mode=append",
        "--dependency=singleton",
        "--no-requeue",
        "--ntasks-per-node=1",
    ]
    done = run(["sbatch", *own, *options, os.path.join(directory, "script")], SUBMIT_TIMEOUT_S)
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1].split(";")[0]
    reason = complaint(done)
    raise (RuntimeError if OUTAGES.search(reason) else RejectedError)(reason)


def signal(jobs: Iterable[Mapping[str, str]], name: str) -> None:
    """Signal the processes of jobs that run, but for KILL not the script; cancel jobs that do not run yet."""
    for job in jobs:
        if job["state"] == "RUNNING":
            # A step that has not begun gets no signal: the caller's grace ends that job.
            run(["scancel", *(["--full"] if name == "KILL" else []), f"--signal={name}", job["id"]])
        if job["state"] != "COMPLETING" and (job["state"] != "RUNNING" or name == "KILL"):
            done = run(["scancel", job["id"]])
            if done.returncode != 0 and "Invalid job id" not in done.stderr and "already" not in done.stderr:
                raise RuntimeError(complaint(done))


def known_job(job_id: str, directory: str) -> dict[str, str]:
    """Return what the controller remembers of a directory's job, else its accounts, where it has any.

    A controller that lost its state gives ids again: another job may have this one by now.
    """
    done = run(["scontrol", "show", "job", "-o", job_id])
    if done.returncode == 0 and f" WorkDir={directory} " in done.stdout.replace("\n", " "):
        return {"id": job_id, **parse_job(done.stdout)}
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise RuntimeError(complaint(done))
    form = "--format=JobID,State,ExitCode,End,Partition,JobName"
    with suppress(OSError, RuntimeError):
        found = output_of("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", form)
        for job in rows(found, "|", "id", "state", "exit", "ends_at", "partition", "name"):
            if job["name"] == os.path.basename(directory):
                return job
    return {"id": job_id}


def rows(text: str, separator: str, *names: str) -> list[dict[str, str]]:
    """Return lines of columns by the names of these; the last may hold the separator."""
    found = (line.split(separator, len(names) - 1) for line in text.splitlines())
    # Python 3.7, which a login node may have, knows no `strict`.
    return [dict(zip(names, row)) for row in found if len(row) == len(names)]  # noqa: B905


def parse_job(text: str) -> dict[str, str]:
    """Return state, reason, exit code and end of a line of `scontrol show job -o`."""
    names = {
        "state": "JobState",
        "reason": "Reason",
        "exit": "ExitCode",
        "ends_at": "EndTime",
        "partition": "Partition",
    }
    found = dict(re.findall(r"(?<!\S)(\w+)=(\S+)", text))
    return {name: found[word] for name, word in names.items() if word in found}


def place_of(text: str) -> str:
    """Return the nodes of `scontrol show job -d` with the numbers of their GPUs, or how many they are."""
    found = re.findall(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=\S*?gpu\S*?\(IDX:([0-9,-]+)\)", text)
    if found:
        return ", ".join(f"{nodes} GPU {numbers}" for nodes, numbers in found)
    nodes = re.search(r"\sNodeList=([^\s(]+)", text)
    # AllocTRES is called TRES before version 22.05.9.
    gpus = re.search(r"(?:Alloc)?TRES=\S*?gres/gpu(?::[^=,\s]+)?=(\d+)", text)
    if not nodes or not gpus:
        return nodes[1] if nodes else ""
    return f"{nodes[1]}, {gpus[1]} GPU{'' if int(gpus[1]) == 1 else 's'}"


def state_of(job: Mapping[str, str]) -> str:
    """Return a state without what follows it, as in `CANCELLED by 1000`; empty if it is unknown."""
    return re.split(r"[ +]", job.get("state", ""), maxsplit=1)[0]


def exit_code_of(job: Mapping[str, str]) -> int | None:
    """Return the exit code that Slurm tells, as a shell would; None for a job that it ended without one."""
    code, _, number = job.get("exit", "").partition(":")
    if not (code.isdigit() and number.isdigit()):
        return None
    return int(code) or (128 + int(number) if int(number) else 0 if state_of(job) == "COMPLETED" else None)


def described(job: Mapping[str, str], granted: str) -> dict[str, Any]:
    """Return what is told of a job; `granted` is what `scontrol show job -d` said at its begin."""
    state, reason = state_of(job), job.get("reason", "None")
    word = re.split(r"\W", reason, maxsplit=1)[0]
    words = WAITS.get(word) or NEVER.get(word)
    wait = f"{words} ({reason})" if words and word != "None" else words or reason
    return {
        "id": job["id"],
        "state": state,
        "reason": "" if reason == "None" else reason,
        "wait": wait if state == "PENDING" else "",
        "never": state == "PENDING" and word in NEVER,
        "end": ENDS.get(state, ""),
        "where": place_of(granted),
        "begins_at": time_of(job.get("begins_at", "")),
        "partition": job.get("partition", ""),
    }


def time_of(text: str) -> float | None:
    """Return seconds since the epoch, None for Slurm's N/A, Unknown and None."""
    with suppress(ValueError):
        return float(text)
    return None


def output_of(*command: str) -> str:
    """Return the output of one of Slurm's commands; raises `RuntimeError` with its own sentence."""
    done = run(command)
    if done.returncode != 0:
        raise RuntimeError(complaint(done))
    return done.stdout


def run(command: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a command in English, with times in seconds since the epoch and without the user's own formats.

    Raises `RuntimeError` if it gives no answer.
    """
    foreign = re.compile(r"(SQUEUE|SACCT|SCANCEL|SCONTROL)_|SLURM_(?!CONF|JWT)")
    own = {
        name: value
        for name, value in os.environ.items()
        if not (foreign.match(name) or NOT_INHERITED.match(name))  # sbatch gives the job what it has
    }
    try:
        return subprocess.run(
            command,
            env={**own, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # other jobs of the user may have any name
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} gave no answer within {timeout_s:g} s") from error


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Return Slurm's own reason in one line, without the name of its program."""
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
    told = "; ".join(re.sub(r"^\w+: (?:error|fatal): ", "", line) for line in lines)
    return told.replace("Batch job submission failed: ", "")
