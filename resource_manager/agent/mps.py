"""MPS control daemons of a server's shared GPUs, which enforce what fractions of a GPU may use.

Standard library only. Each daemon has a folder, named by the GPU's UUID, with its pipes and its logs; it
writes its process id there, by which a restarted agent finds it. After NVIDIA's documentation of
the Multi-Process Service (`nvidia-cuda-mps-control`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

CONTROL = "nvidia-cuda-mps-control"
TIMEOUT_S = 10.0
MAX_REASON = 200
_UUID = re.compile(r"GPU-[A-Za-z0-9-]{1,60}")


def pipe_folder(folder: str) -> str:
    """Return where programs find the daemon of a GPU, by its folder: `CUDA_MPS_PIPE_DIRECTORY`."""
    return f"{folder}/pipe"


def keep(wanted: object) -> dict[str, object]:
    """Start the daemons that are wanted and do not run, end the others; return what a report says of it.

    `wanted` is what the service's answer says: the folder of the server's daemons, and the UUIDs of the GPUs
    with shares. Without one, as from a service that knows no daemons, nothing is done.
    """
    if not isinstance(wanted, Mapping) or not os.path.isabs(str(wanted.get("folder"))):
        return {}
    root = str(wanted["folder"])
    uuids = [str(uuid) for uuid in wanted.get("uuids") or () if _UUID.fullmatch(str(uuid))]
    try:
        error = _make(root)
        for uuid in [] if error else uuids:
            if not is_running(f"{root}/{uuid}"):
                error = _start(f"{root}/{uuid}", uuid) or error
        for uuid in [] if error else sorted({*os.listdir(root)} - {*uuids}):
            if _UUID.fullmatch(uuid):
                error = _end(f"{root}/{uuid}") or error
    except (OSError, subprocess.SubprocessError) as problem:
        error = str(problem)
    running = [uuid for uuid in uuids if is_running(f"{root}/{uuid}")]
    return {"mps": running, "mps_error": error[:MAX_REASON] or None}


def is_running(folder: str) -> bool:
    """Return True if the daemon whose folder this is runs."""
    try:
        with open(f"{pipe_folder(folder)}/{CONTROL}.pid", encoding="ascii") as file:
            process = int(file.read())
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return CONTROL.encode() in file.read()
    except (OSError, ValueError):
        return False


def _make(folder: str) -> str:
    """Make a folder that others may enter; return why it is not fit for daemons, empty if it is."""
    os.makedirs(folder, exist_ok=True)
    if os.lstat(folder).st_uid != os.geteuid() or os.path.islink(folder):
        return f"{folder} is not this agent's own"
    os.chmod(folder, 0o755)  # jobs of other users look for the pipes in it
    return ""


def _start(folder: str, uuid: str) -> str:
    """Start the daemon of a GPU; return why it does not run, empty if it does."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    shutil.rmtree(pipe_folder(folder), ignore_errors=True)  # what a daemon that died left
    for each in (folder, pipe_folder(folder), f"{folder}/log"):
        if error := _make(each):
            return error
    done = _control(folder, "-d", uuid=uuid)
    if done.returncode or not is_running(folder):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{CONTROL} of {uuid} did not start: {said[-1] if said else f'exit code {done.returncode}'}"
    return ""


def _end(folder: str) -> str:
    """End the daemon of a GPU without shares and remove its folder; return why it still runs."""
    if is_running(folder):
        _control(folder, commands=b"quit\n")
        if is_running(folder):
            return f"{CONTROL} of {os.path.basename(folder)} does not quit"
    shutil.rmtree(folder, ignore_errors=True)
    return ""


def _control(
    folder: str, *options: str, uuid: str = "", commands: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    own = {"CUDA_MPS_PIPE_DIRECTORY": pipe_folder(folder), "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    return subprocess.run(
        [CONTROL, *options],
        input=commands,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": uuid} if uuid else {})},
        timeout=TIMEOUT_S,
        start_new_session=True,  # it outlives the agent, whose clients it would take along
    )
