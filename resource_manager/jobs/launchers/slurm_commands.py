"""Slurm's commands and what they say; standard library only, as `slurm_job`, which it is sent with.

The forms are those of 22.05; `--json` is not used, since it differs from one version to the next.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

COMMAND_TIMEOUT_S = 50.0
SUBMIT_TIMEOUT_S = 30.0

FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "begins_at": "%S",
    "partition": "%P",
    "where": "%Z",
    "name": "%j",
}
"""What is asked of each job; the directory tells a job of ours from one that has its name."""

OUTAGES = (
    "Unable to contact",
    "timed out",
    "Zero Bytes",
    "not connected",
    "onnection ",
    "standby mode",
    "temporarily",
    "configuration source",
)
"""Parts of Slurm's errors after which a job may have been submitted, or is taken a little later."""

LIVE = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "STOPPED")
"""States of a job that is in the queue, though it was not when the queue was read."""


class RejectedError(Exception):
    """Slurm did not take the job, for the reason that it gives."""


def queue(key: str = "") -> list[dict[str, str]]:
    """Return the user's jobs that have not ended, all or those of that name."""
    named = [f"--name={key}"] if key else []
    fields = "\t".join(FIELDS.values())
    return parse_queue(output_of("squeue", "--me", "--all", "--noheader", f"--format={fields}", *named))


def submit(key: str, directory: str, options: Sequence[str], comment: str) -> str:
    """Return the id of the new job; raises `RejectedError` if there is none, `RuntimeError` if unknown."""
    command = [
        "sbatch",
        "--parsable",
        f"--job-name={key}",
        f"--comment={comment}",
        f"--chdir={directory}",
        f"--output={directory.replace('%', '%%')}/log",
        "--open-mode=append",
        "--dependency=singleton",
        "--no-requeue",
        "--ntasks-per-node=1",
        *options,
        os.path.join(directory, "script"),
    ]
    try:
        done = run(command, SUBMIT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"sbatch gave no answer within {SUBMIT_TIMEOUT_S:g} s") from error
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1].split(";")[0]
    reason = complaint(done)
    if any(part in reason for part in OUTAGES):
        raise RuntimeError(reason)
    raise RejectedError(reason)


def cancel(jobs: Iterable[Mapping[str, str]], signal_name: str) -> None:
    """Signal the command of jobs that run; end all of it by KILL, and what does not run yet."""
    for job in jobs:
        if job["state"] == "COMPLETING":
            continue
        if job["state"] == "RUNNING" and signal_name != "KILL":
            run(["scancel", "--batch", f"--signal={signal_name}", job["id"]])  # if it has begun by now
            continue
        if job["state"] == "RUNNING":
            run(["scancel", "--full", "--signal=KILL", job["id"]])
        done = run(["scancel", job["id"]])
        if done.returncode != 0 and "Invalid job id" not in done.stderr and "already" not in done.stderr:
            raise RuntimeError(complaint(done))


def ended_job(job_id: str) -> dict[str, str]:
    """Return what Slurm remembers of a job that is not in its queue, from its controller or its accounts."""
    done = run(["scontrol", "show", "job", "-o", job_id])
    if done.returncode == 0:
        return parse_job(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise RuntimeError(complaint(done))
    return next(iter(accounted(job_id=job_id)), {})


def accounted(key: str = "", job_id: str = "") -> list[dict[str, str]]:
    """Return the jobs of that name or id in Slurm's accounts; none where it keeps none or they are away."""
    wanted = [f"--jobs={job_id}"] if job_id else [f"--name={key}", "--starttime=now-8days"]
    fields = "--format=JobID,State,ExitCode,End,Partition,WorkDir,JobName"
    with suppress(OSError, subprocess.TimeoutExpired):
        done = run(["sacct", "--allocations", "--noheader", "--parsable2", *wanted, fields])
        return parse_account(done.stdout) if done.returncode == 0 else []
    return []


def exit_code_of(ended: Mapping[str, str]) -> int | None:
    """Return the exit code that Slurm tells, as a shell would; None for a job that it ended without one."""
    code, _, number = ended.get("exit", "").partition(":")
    if not (code.isdigit() and number.isdigit()):
        return None
    if ended.get("state", "").startswith("COMPLETED"):
        return 0
    return int(code) or (128 + int(number) if int(number) else None)


def parse_queue(text: str) -> list[dict[str, str]]:
    """Return the jobs of `squeue` in the form of `FIELDS`, which all versions give alike."""
    rows = (line.split("\t", len(FIELDS) - 1) for line in text.splitlines())
    # Python 3.7, which a login node may have, knows no `strict`.
    return [dict(zip(FIELDS, row)) for row in rows if len(row) == len(FIELDS)]  # noqa: B905


def parse_job(text: str) -> dict[str, str]:
    """Return state, reason, exit code, end and partition of a line of `scontrol show job -o`."""
    names = {
        "state": "JobState",
        "reason": "Reason",
        "exit": "ExitCode",
        "ends_at": "EndTime",
        "partition": "Partition",
    }
    found = {name: re.search(rf"(?:^|\s){word}=(\S+)", text) for name, word in names.items()}
    return {name: match[1] for name, match in found.items() if match is not None}


def parse_account(text: str) -> list[dict[str, str]]:
    """Return the jobs of `sacct --parsable2`, without their steps."""
    names = ("id", "state", "exit", "ends_at", "partition", "where", "name")
    rows = (line.split("|", len(names) - 1) for line in text.splitlines())
    return [dict(zip(names, row)) for row in rows if len(row) == len(names) and "." not in row[0]]  # noqa: B905


def parse_devices(text: str) -> list[list[str]]:
    """Return [nodes, GPU numbers] of `scontrol show job -d`, without numbers where Slurm keeps no index."""
    found = re.findall(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=\S*?gpu\S*?\(IDX:([0-9,-]+)\)", text)
    if found:
        return [list(each) for each in found]
    nodes = re.search(r"\sNodeList=(\S+)", text)
    return [[nodes[1], ""]] if nodes and nodes[1] != "(null)" else []


def parse_gpus(text: str) -> int:
    """Return the number of GPUs of `AllocTRES`, or `TRES` before version 22.05.9, 0 if it names none."""
    found = re.search(r"(?:Alloc)?TRES=\S*?gres/gpu(?::[^=,\s]+)?=(\d+)", text)
    return int(found[1]) if found else 0


def state_word(job: Mapping[str, str]) -> str:
    """Return a state without what follows it, as in `CANCELLED by 1000`."""
    return re.split(r"[ +]", job.get("state", ""), maxsplit=1)[0]


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
    """Run a command in English, with times in seconds since the epoch and without the user's own formats."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"(SQUEUE|SACCT|SCANCEL|SCONTROL)_|SLURM_(?!CONF|JWT)", name)
    }
    return subprocess.run(
        command,
        env={**own, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Return Slurm's own reason in one line, without the name of its program."""
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
    told = "; ".join(re.sub(r"^\w+: (?:error|fatal): ", "", line) for line in lines)
    return told.replace("Batch job submission failed: ", "")
