"""Program that Slurm runs for a job; standard library only, as `slurm_job`, which it is sent with."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from resource_manager.jobs.directories import job_files, starting

# The command runs in a step, on one node as on many: Slurm then signals the command alone, and once.
# srun ends with 0 when a node fails, and a member that was told to end says 0 to it. `failed` is listed, not
# looked up: a shared folder may remember for a while that a name was not there. A job that somebody had
# requeued has the end of its last run.
SCRIPT = """#!/bin/sh
[ ! -e {tombstone} ] || exit 0
cd {directory} || exit 1
mkdir begun 2>/dev/null && echo "$SLURM_JOB_ID" > begun/job
[ -s begun/job ] || {{ echo "gpu-manager: $PWD cannot be written"; exit 1; }}
[ "$(cat begun/job)" = "$SLURM_JOB_ID" ] || exit 0
rm -f failed succeeded exit_code
trap : TERM INT HUP USR1 USR2
scontrol show job -d -o "$SLURM_JOB_ID" > begun/granted
date +%s > begun/at
export SLURM_OVERLAP=1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    GPU_NODES_IPS=$(for node in $nodes; do
        scontrol show node -o "$node" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'
    done)
    MASTER_ADDR=$(echo "$GPU_NODES_IPS" | head -n 1)
    MASTER_PORT=$((29500 + SLURM_JOB_ID % 500))
    GPU_NODES_NUM=$SLURM_JOB_NUM_NODES
    GPU_GPUS_PER_NODE={gpus}
    GPU_GPUS_NUM=$((GPU_GPUS_PER_NODE * GPU_NODES_NUM))
    GPU_HOSTFILE=$PWD/hostfile
    for node in $nodes; do echo "$node slots={slots}"; done > hostfile
    GPU_MASTER_ADDR=$MASTER_ADDR GPU_MASTER_PORT=$MASTER_PORT PET_MASTER_ADDR=$MASTER_ADDR
    PET_MASTER_PORT=$MASTER_PORT PET_NNODES=$GPU_NODES_NUM PET_NPROC_PER_NODE={slots} PET_RDZV_ID={key}
    export GPU_NODES_IPS MASTER_ADDR MASTER_PORT GPU_NODES_NUM GPU_GPUS_PER_NODE GPU_GPUS_NUM GPU_HOSTFILE \\
        GPU_MASTER_ADDR GPU_MASTER_PORT PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NPROC_PER_NODE \\
        PET_RDZV_ID
fi
srun --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --export=ALL --mpi=none \\
    --cpus-per-task=${{SLURM_CPUS_PER_TASK:-1}} --kill-on-bad-exit=1 ./run 2> srun
code=$?
if [ $code -eq 0 ] && {{ ls | grep -qx failed || [ ! -e succeeded ] || grep -q "Node failure" srun; }}; then
    code=1
fi
if [ $code -ne 0 ]; then
    if [ -s failed ]; then code=$(cat failed); else cat srun; fi
    for each in log.*; do
        [ -e "$each" ] && tail -n 20 "$each" | sed "s/^/[rank ${{each#log.}}] /"
    done
fi
echo $code > exit_code.new && mv exit_code.new exit_code
exit $code
"""

# The output goes to its file, not by way of srun. The first member that fails is the cause; the others are
# ended by srun, unless all of them were told to end: then each has its grace. That signal may come once more
# while a member notes its end, and would end a program that it starts for that. `mpirun` reads how many
# processes it may start on a node from the variable that Slurm sets to 1 here, and a program of MPI that
# finds itself in a step asks Slurm for a service that may not be there.
RUN = """#!/bin/sh
rank=$SLURM_NODEID
unset SLURM_STEP_ID SLURM_STEPID
export SLURM_TASKS_PER_NODE="{slots}(x$SLURM_JOB_NUM_NODES)"
{exports}
export GPU_LEASE_GPUS="${{SLURM_STEP_GPUS:-$SLURM_JOB_GPUS}}" GPU_SERVER="$SLURMD_NODENAME"
[ "$SLURM_JOB_NUM_NODES" = 1 ] || export GPU_NODE_RANK="$rank" PET_NODE_RANK="$rank"
if [ "$rank" = 0 ]; then exec >> {directory}/log 2>&1; else exec > {directory}/log."$rank" 2>&1; fi
ended() {{
    cd {directory} || exit "$1"
    if [ "$1" != 0 ]; then
        set -C
        {{ echo "$1" > failed; }} 2>/dev/null
        [ -z "$told" ] && [ ! -e {preempted} ] || exit 0
    elif [ "$rank" = 0 ]; then : > succeeded; fi
    exit "$1"
}}
told=
trap told=1 TERM
trap : INT HUP USR1 USR2
trap 'ended $?' EXIT
cd {working_dir}
{command}
"""


def write_program(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: Mapping[str, str],
    gpus: int,
) -> None:
    """Write `script`, which Slurm runs, and `run`, which that runs on each node; raises `ValueError`."""
    variables = {**environment, **starting.own_variables(root, key, files)}
    for name in variables:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"env: {name!r} is not a name that a shell can export")
    directory, home = job_files.directory_of(root, key), os.path.expanduser("~")
    given = {
        "gpus": gpus,
        "slots": max(1, gpus),
        "key": shlex.quote(key),
        "directory": shlex.quote(directory),
        "preempted": job_files.PREEMPTED,
        "tombstone": shlex.quote(job_files.tombstone_of(root, key)),
        "working_dir": shlex.quote(home if os.path.isdir(home) else directory),
        "exports": "\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        "command": " ".join(map(shlex.quote, command)),
    }
    for name, text in (("script", SCRIPT), ("run", RUN)):
        path = os.path.join(directory, name)
        job_files.write_file(path, text.format(**given))
        os.chmod(path, 0o700)
