"""Walls around a plain job by bubblewrap; standard library only, as it runs on the job's server.

In the walls are the device files of the job's own GPUs and no others, a PID namespace that ends with the
command, and a read-only system. Writable are the job's own directory, a `/tmp` of its own and what the
cluster file names. Sockets in `/run` and the folders of other jobs are not there, no program gains rights,
and there are no capabilities. A job cannot type into the terminal that it may have. The network, and CPUs
and memory, are not walled.

The source of this module is the program that a walled command begins with: it becomes `bwrap`, and that
becomes the command. `--check` in place of the command tries the same and prints what is missing. Both run
outside, so the job's own variables, such as `LD_PRELOAD`, are set within the walls only.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

BUBBLEWRAP = "bubblewrap"
"""What a job's place says of its walls where they stand; else it begins with `NONE`."""

NONE = "none: "
CHECK = "--check"
CHECK_TIMEOUT_S = 20.0

HIDDEN = ("/run", "/tmp", "/var/tmp")
"""Folders of which the job sees none, or one of its own."""

PROC = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi")
"""Files by which the kernel of the whole server is set; bubblewrap covers some, and not `/proc/sys`."""

MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"

SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ("user/max_user_namespaces", "0"),
)
"""Kernel settings under /proc/sys, and the value at which an ordinary user can make no namespaces."""

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the job's process group gets and bubblewrap would die of: they are the command's."""

# Signals that were ignored for bubblewrap are the command's again. One told meanwhile does not begin.
BEGIN = """
import json, os, signal, sys
for number in range(1, signal.NSIG):
    try:
        signal.signal(number, signal.SIG_DFL)
    except OSError:  # SIGKILL and SIGSTOP, and those of the C library
        pass
if os.path.exists(os.environ.get("GPU_PREEMPT_FILE", "")):
    sys.exit(143)
os.environ.update(json.loads(os.environ.pop("GPU_JOB_ENVIRONMENT", "{}")))  # starting.SET_WITHIN
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


X32 = 0x40000000
CALLS = {
    0xC000003E: ((16, X32 | 514), (56, 272, X32 | 56, X32 | 272), (435, X32 | 435)),  # x86-64
    0x40000003: ((54,), (120, 310), (435,)),  # i386
    0xC00000B7: ((29,), (220, 97), (435,)),  # AArch64
    0x40000028: ((54,), (120, 337), (435,)),  # Arm
    0xC00000F3: ((29,), (220, 97), (435,)),  # RISC-V
    0xC0000015: ((54,), (120, 282), (435,)),  # POWER
}
"""Numbers of `ioctl`, of `clone` and `unshare`, of `clone3`, by the `AUDIT_ARCH` of linux/audit.h."""

TIOCSTI, TIOCLINUX = 0x5412, 0x541C
"""Requests that type characters into a terminal, which the shell would carry out that comes after the job."""

CLONE_NEWCGROUP = 0x02000000
"""Flag with which a job could mount its cgroup, and end all that is in it, other jobs and its agent too.

It needs no rights for that where the cgroup is its user's, as for root.
"""


class MissingError(Exception):
    """The walls cannot be built, for this reason."""


def refusal(server: str, missing: str) -> str:
    """Return why a job that must have walls is not started."""
    return f"{server} confines its jobs (confine = must), but {missing}"


def telling(reason: str) -> list[str]:
    """Return the arguments of Python that a command without walls follows: its output says so first."""
    said = f"gpu-manager: walls: {NONE}{reason}"
    return ["-I", "-S", "-c", f"import sys\nprint({said!r}, file=sys.stderr, flush=True){BEGIN}"]


def program_of(
    gpu_ids: Sequence[int], gpu_uuids: Sequence[str], vendor: str, writable: Sequence[str], mps: str = ""
) -> list[str]:
    """Return the arguments of Python that run this module for a job with these GPUs.

    `CHECK`, or the command, follows. `writable` are paths on the server; `~` is the home of its user. `mps`
    is the folder of the pipes of the GPU's MPS daemon, if the job is on a fraction.
    """
    import inspect  # slow, and not for the job's server

    wanted: dict[str, Any] = {"ids": list(gpu_ids), "uuids": list(gpu_uuids), "vendor": vendor}
    wanted |= {"writable": list(writable), "mps": mps}
    source = inspect.getsource(sys.modules[__name__])
    return ["-I", "-S", "-c", source, json.dumps(wanted)]


def check_program(writable: Sequence[str]) -> str:
    """Return a program for a server that prints what a job without GPUs would miss for its walls there."""
    return f"""
import os, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    directory = os.path.join(folder, "job")
    os.mkdir(directory)
    os.environ["GPU_JOB_LOCK"] = os.path.join(directory, "lock")
    check = {[*program_of((), (), "", writable), CHECK]!r}
    sys.exit(subprocess.run([sys.executable, *check], stdin=subprocess.DEVNULL).returncode)
"""


def main(wanted: Mapping[str, Any], command: Sequence[str]) -> None:
    """Become the command within its walls, or say why not: exit code 126, or 0 for a check."""
    try:
        if list(command) == [CHECK]:
            _try(wanted)
            return
        arguments = [*_bubblewrap(wanted), "--seccomp", str(_filter()), *_beginning(), *command]
        print(f"gpu-manager: walls: {BUBBLEWRAP}", file=sys.stderr, flush=True)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        os.execv(arguments[0], arguments)
    except (MissingError, OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        if list(command) == [CHECK]:
            print(reason)
            return
        print(f"gpu-manager: the job cannot have its walls: {reason}", file=sys.stderr)
        sys.exit(126)


def _try(wanted: Mapping[str, Any]) -> None:
    """Raise `MissingError` unless a command runs within these walls."""
    descriptor = _filter()
    arguments = [*_bubblewrap(wanted), "--seccomp", str(descriptor), *_beginning(), "true"]
    found = subprocess.run(
        arguments,
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=CHECK_TIMEOUT_S,
    )
    if found.returncode == 0:
        return
    said = found.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
    for name, off in SWITCHES if os.geteuid() else ():
        try:
            with open(f"/proc/sys/{name}") as file:
                if file.read().strip() == off:
                    setting = name.replace("/", ".")
                    raise MissingError(f"unprivileged user namespaces are switched off ({setting}={off})")
        except OSError:  # this kernel has no such setting
            pass
    raise MissingError(f"bwrap fails: {said[-1]}")


def _filter() -> int:
    """Return a descriptor with the program by which the kernel refuses these requests and this flag (EPERM).

    `clone3` has its flags in memory that no filter sees: it is not there (ENOSYS), and `clone` is used.
    """
    load, equal, any_bit, leave = 0x20, 0x15, 0x45, 0x06
    allow, refuse, missing = (
        (leave, 0, 0, answer) for answer in (0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38)
    )
    ends = [
        *(allow, (load, 0, 0, 24), (equal, 4, 0, TIOCSTI), (equal, 3, 0, TIOCLINUX), allow),
        *((load, 0, 0, 16), (any_bit, 0, 2, CLONE_NEWCGROUP), refuse, missing, allow),
    ]
    steps = [(load, 0, 0, 4)]  # the architecture; the number is at 0, the first two arguments at 16 and 24
    for architecture, kinds in CALLS.items():
        numbers = [(number, end) for place, end in enumerate((1, 5, 8)) for number in kinds[place]]
        own = [(load, 0, 0, 0)]
        own += [(equal, len(numbers) - 1 - i + end, 0, number) for i, (number, end) in enumerate(numbers)]
        steps += [(equal, 0, len(own) + len(ends), architecture), *own, *ends]
    reading, writing = os.pipe()
    os.write(writing, b"".join(struct.pack("=HBBI", *step) for step in [*steps, allow]))
    os.close(writing)
    os.set_inheritable(reading, True)
    return reading


def _beginning() -> list[str]:
    # The virtual environment of this interpreter may be out of sight; what it was made from is the system's.
    return ["--", os.path.realpath(sys.executable), "-I", "-S", "-c", BEGIN]


def _bubblewrap(wanted: Mapping[str, Any]) -> list[str]:
    """Return the bwrap program and its options for the job of this environment."""
    bwrap = shutil.which("bwrap") if sys.platform == "linux" else None
    if bwrap is None:
        raise MissingError("bwrap is missing: install bubblewrap")
    directory = os.path.dirname(os.environ["GPU_JOB_LOCK"])
    root = os.path.dirname(_without_links(directory))
    temporary = os.path.join(directory, "tmp")
    os.makedirs(temporary, mode=0o700, exist_ok=True)
    options = ["--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"]
    options += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    for path in _devices(wanted):
        options += ["--dev-bind", path, path]
    if os.geteuid() == 0:  # who owns these files writes them without any capability
        for path in PROC:
            options += ["--ro-bind-try", path, path]
    options += ["--tmpfs", "/run"]
    for path in HIDDEN[1:]:
        options += ["--bind", temporary, path]
    names = os.path.realpath("/etc/resolv.conf")
    if names.startswith("/run/") and os.path.exists(names):
        options += ["--ro-bind", names, names]
    mps = wanted["mps"]
    if mps:  # its clients and its daemon meet there, and in shared memory
        options.remove("--unshare-ipc")
        options += ["--bind-try", mps, mps, "--bind", "/dev/shm", "/dev/shm"]
    folder = os.path.realpath(os.getcwd())
    if _is_hidden(folder):
        options += ["--ro-bind", folder, folder]
    for path in wanted["writable"]:
        own = os.path.realpath(os.path.expanduser(path))
        if not os.path.exists(own):
            raise MissingError(f"{path} of writable does not exist")
        options += ["--bind", own, own]
    # After `writable`, which may have the folder of all jobs in it.
    options += ["--tmpfs", root, *_shown(directory, "--ro-bind", folder)]
    if "GPU_JOB_DIR" in os.environ:
        options += _shown(os.environ["GPU_JOB_DIR"], "--bind", folder)
    return [bwrap, *options, "--remount-ro", root]


def _is_hidden(path: str) -> bool:
    return any(path.startswith(f"{folder}/") for folder in HIDDEN)


def _shown(path: str, kind: str, working_dir: str) -> list[str]:
    """Return the options that show a folder of the job, also at its path through a link that is not seen."""
    real = _without_links(path)
    is_seen = not _is_hidden(path) or path.startswith(f"{working_dir}/")
    return [kind, real, real, *(() if path == real or is_seen else (kind, real, path))]


def _without_links(path: str) -> str:
    """Return the path with its folders as they are: bubblewrap mounts upon no path that has a link in it."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _devices(wanted: Mapping[str, Any]) -> list[str]:
    """Return the device files of the GPUs, with those that all GPUs of the maker share, if they exist."""
    ids, vendor = wanted["ids"], wanted["vendor"]
    if not ids:
        return []
    if vendor == "amd":
        found = ["/dev/kfd", *amd_files(ids)]
    elif vendor == "ascend":
        shared = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
        found = [*shared, *(f"/dev/davinci{number}" for number in ids)]
    else:
        found = ["/dev/nvidiactl", *glob.glob("/dev/nvidia-uvm*"), *nvidia_files(ids, wanted["uuids"])]
    # Members of a gang meet by InfiniBand; the network is not walled.
    return [path for path in (*found, "/dev/infiniband") if os.path.exists(path)]


def amd_files(ids: Sequence[int], nodes: str = "/sys/class/kfd/kfd/topology/nodes") -> list[str]:
    """Return the render nodes of AMD's GPUs, which are numbered in the order of the driver's nodes."""
    minors = []
    for name in sorted(filter(str.isdigit, os.listdir(nodes)) if os.path.isdir(nodes) else [], key=int):
        with open(os.path.join(nodes, name, "properties")) as file:
            properties = dict(line.split() for line in file if len(line.split()) == 2)
        if int(properties.get("drm_render_minor", 0)) > 0:  # a node without one is a CPU
            minors.append(properties["drm_render_minor"])
    return [f"/dev/dri/renderD{minors[number]}" for number in ids if number < len(minors)]


def nvidia_files(ids: Sequence[int], uuids: Sequence[str], minors: str = MIG_MINORS) -> list[str]:
    """Return the files of NVIDIA's GPUs and MIG devices; without its library their numbers are the files'."""
    try:
        nvml = ctypes.CDLL(os.environ.get("GPU_MANAGER_NVML") or "libnvidia-ml.so.1")
    except OSError:
        return [f"/dev/nvidia{number}" for number in ids]
    _check(nvml.nvmlInit_v2(), "the driver")
    found = []
    for name in uuids or ids:
        handle = ctypes.c_void_p()
        if uuids:
            code = nvml.nvmlDeviceGetHandleByUUID(str(name).encode(), ctypes.byref(handle))
        else:
            code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        _check(code, name)
        parent = ctypes.c_void_p()
        if nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle, ctypes.byref(parent)) == 0:
            gpu = _number(nvml.nvmlDeviceGetMinorNumber, parent, name)
            part = f"gpu{gpu}/gi{_number(nvml.nvmlDeviceGetGpuInstanceId, handle, name)}"
            inner = f"{part}/ci{_number(nvml.nvmlDeviceGetComputeInstanceId, handle, name)}"
            found += [f"/dev/nvidia{gpu}", *_capabilities((part, inner), minors)]
        else:
            found.append(f"/dev/nvidia{_number(nvml.nvmlDeviceGetMinorNumber, handle, name)}")
    return list(dict.fromkeys(found))


def _number(function: Any, handle: ctypes.c_void_p, name: object) -> int:
    value = ctypes.c_uint()
    _check(function(handle, ctypes.byref(value)), name)
    return value.value


def _check(code: int, name: object) -> None:
    if code != 0:
        raise MissingError(f"NVIDIA's library knows no device file of {name} (error {code})")


def _capabilities(parts: Sequence[str], minors: str) -> list[str]:
    """Return the files that let a process use these parts of MIG GPUs."""
    try:
        with open(minors) as file:
            known = dict(line.split() for line in file if len(line.split()) == 2)
    except OSError as error:
        raise MissingError(f"{minors}, which says what a MIG device needs: {error.strerror}") from error
    return [f"/dev/nvidia-caps/nvidia-cap{known[f'{part}/access']}" for part in parts]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
