"""Program that Slurm runs for a job; standard library only, as `slurm_job`, which it is sent with."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from resource_manager.jobs.launchers import directory_job as folder

# The forwarded signal reaches the command's own process group once. `wait` returns early when the shell gets
# a signal, so it is called again while the command is there.
SCRIPT = """#!/bin/sh
[ ! -e {tombstone} ] || exit 0
cd {directory} || exit 1
mkdir begun 2>/dev/null && echo "$SLURM_JOB_ID" > begun/job
[ "$(cat begun/job)" = "$SLURM_JOB_ID" ] || exit 0
scontrol show job -d -o "$SLURM_JOB_ID" > begun/granted
date +%s > begun/at
{gang}
setsid {command} &
child=$!
for each in TERM INT HUP USR1 USR2; do
    trap "kill -$each -$child 2>/dev/null" $each
done
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
{tails}
echo $code > exit_code.new && mv exit_code.new exit_code
exit $code
"""

GANG = """
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
SLURM_OVERLAP=1
export GPU_NODES_IPS MASTER_ADDR MASTER_PORT GPU_NODES_NUM GPU_GPUS_PER_NODE GPU_GPUS_NUM GPU_HOSTFILE \\
    GPU_MASTER_ADDR GPU_MASTER_PORT PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NPROC_PER_NODE \\
    PET_RDZV_ID SLURM_OVERLAP
"""

MEMBERS = """srun --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 \\
    --cpus-per-task=${SLURM_CPUS_PER_TASK:-1} --export=ALL --mpi=none --kill-on-bad-exit=1 ./run"""

TAILS = """
if [ $code -ne 0 ]; then
    [ ! -e failed/exit_code ] || code=$(cat failed/exit_code)
    for each in log.*; do
        [ -e "$each" ] && tail -n 20 "$each" | sed "s/^/[rank ${each#log.}] /"
    done
fi
"""

RUN = """#!/bin/sh
{exports}
export GPU_LEASE_GPUS="${{SLURM_STEP_GPUS:-$SLURM_JOB_GPUS}}" GPU_SERVER="$SLURMD_NODENAME"
cd {working_dir}
{member}{command}
"""

# The first member that fails is the cause; the others are ended by srun. `mpirun` reads how many processes it
# may start on a node from the variable that Slurm sets to 1 here.
MEMBER = """export GPU_NODE_RANK="$SLURM_NODEID" PET_NODE_RANK="$SLURM_NODEID"
export SLURM_TASKS_PER_NODE="{slots}(x$GPU_NODES_NUM)"
[ "$SLURM_NODEID" = 0 ] || exec > {directory}/log."$SLURM_NODEID" 2>&1
ended() {{
    cd {directory} && [ "$1" != 0 ] && mkdir failed 2>/dev/null && echo "$1" > failed/exit_code
    exit "$1"
}}
trap : TERM INT HUP USR1 USR2
trap 'ended $?' EXIT
"""


def write_program(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: Mapping[str, str],
    nodes: int,
    gpus: int,
) -> None:
    directory, own = folder.directory_of(root, key), folder.own_directory_of(root, key)
    os.makedirs(own, mode=0o700, exist_ok=True)
    paths = {variable: os.path.join(directory, variable.lower()) for variable in files}
    for variable, path in paths.items():
        folder.write_file(path, files[variable])
    variables = {
        **environment,
        **paths,
        "GPU_JOB_DIR": own,
        "GPU_CHECKPOINT_FILE": os.path.join(own, folder.CHECKPOINT),
        "GPU_PREEMPT_FILE": os.path.join(directory, folder.PREEMPTED),
    }
    wrong = [name for name in variables if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    if wrong:
        raise ValueError(f"env: {wrong[0]!r} is not a name that a shell can export")
    home = os.path.expanduser("~")
    gang = {"gpus": gpus, "slots": max(1, gpus), "key": shlex.quote(key), "directory": shlex.quote(directory)}
    programs = {
        "run": RUN.format(
            exports="\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
            working_dir=shlex.quote(home if os.path.isdir(home) else directory),
            member=MEMBER.format(**gang) if nodes > 1 else "exec ",
            command=" ".join(map(shlex.quote, command)),
        ),
        "script": SCRIPT.format(
            tombstone=shlex.quote(folder.tombstone_of(root, key)),
            directory=shlex.quote(directory),
            gang=GANG.format(**gang) if nodes > 1 else "",
            command=MEMBERS if nodes > 1 else "./run",
            tails=TAILS if nodes > 1 else "",
        ),
    }
    for name, text in programs.items():
        folder.write_file(os.path.join(directory, name), text)
        os.chmod(os.path.join(directory, name), 0o700)
