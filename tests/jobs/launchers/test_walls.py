"""Walls around plain jobs: what a job within them reaches, what holds as without, and what is said."""

import os
import pty
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import JobPlace
from resource_manager.fleet.opening import REPORTS
from resource_manager.jobs.directories import job_states, starting
from resource_manager.jobs.launchers import Job, JobState, LauncherError, terminal, walls
from resource_manager.jobs.launchers.directory_launcher import check_user
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.jobs.running_job import job_of
from resource_manager.manager.cluster_file.sections import ClusterForm
from tests.builders import granted_lease, nodes
from tests.eventually import wait_for, wait_until_ended
from tests.jobs.launchers.walled_server import ORDINARY, walled_server
from tests.nvml.standin import gpu, library, mig, state, uuid_of

__all__ = ["library", "state"]

SAID = "gpu-manager: walls: bubblewrap\n"
KEY = f"gpu-train-0a1b2c3d-{os.getpid()}"
"""Job of this process: the path of its folder is one in all namespaces, by which `stop` finds processes."""


@pytest.fixture(params=[pytest.param(0, id="root"), pytest.param(ORDINARY, id="ordinary")])
def server(request, tmp_path):
    with walled_server(tmp_path, request.param) as server:
        yield server


@pytest.fixture
def launcher(server):
    launcher = SSHLauncher(JobPlace("ssh", "walled" if server.uid else "root@walled"), server)
    yield launcher
    launcher.stop(KEY, 0.0)


def within(launcher, command, **more):
    """Return exit code and output of a job within walls."""
    job = Job(KEY, ("/bin/sh", "-c", command), confine="must", **more)
    assert launcher.prepare(job).walls == "bubblewrap"
    launcher.start(job)
    ended = wait_until_ended(launcher, KEY)
    text = launcher.logs(KEY).text
    assert text.startswith(SAID)
    return ended.exit_code, text.removeprefix(SAID)


@pytest.mark.e2e
def test_a_job_opens_its_own_gpus_and_no_others(launcher):
    tried = """
    cd /dev && ls -d nvidia*
    for gpu in 0 1 2 3 4; do head -c 2 nvidia$gpu 2>/dev/null | od -An -tx1; done
    """
    assert within(launcher, tried, gpu_ids=(1, 2)) == (
        0,
        "nvidia-uvm\nnvidia-uvm-tools\nnvidia1\nnvidia2\nnvidiactl\n 00 00\n 00 00\n",
    )


@pytest.mark.e2e
def test_a_job_without_gpus_has_none(launcher):
    assert within(launcher, "ls /dev | grep nvidia") == (1, "")


@pytest.mark.e2e
def test_no_job_makes_or_mounts_its_way_to_a_foreign_gpu(launcher):
    tried = """
    mknod /dev/nvidia4 c 1 9; mknod $GPU_JOB_DIR/nvidia4 c 1 9; mknod /tmp/nvidia4 c 1 9
    mount -t devtmpfs dev /mnt; umount /dev; umount /dev/nvidia1
    unshare -Urm sh -c 'umount -l /dev; mount -t devtmpfs dev /mnt; mount -t tmpfs x /tmp; mknod /tmp/y c 1 9'
    ls /dev/nvidia4 /mnt/null /tmp/nvidia4 $GPU_JOB_DIR/nvidia4 /proc/1/root/dev/nvidia4
    """
    code, output = within(launcher, f"({tried}) >/dev/null 2>&1; ls -d /dev/nvidia?", gpu_ids=(1,))
    assert (code, output) == (0, "/dev/nvidia1\n")


@pytest.mark.e2e
def test_no_job_sets_the_kernel(launcher):
    """Root owns these settings without any capability, and one of them names a program that root runs."""
    tried = "cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern"
    assert within(launcher, f"({tried}) 2>/dev/null && echo written") == (2, "")


@pytest.mark.e2e
def test_a_process_that_forks_away_ends_with_the_command(launcher, server, tmp_path):
    mark = f"away-{os.getpid()}-{server.uid}"
    away = f"(setsid sh -c 'exec env -i sh -c \"exec 1>&- 2>&-; while :; do sleep 0.1; done\" {mark}' &) "
    assert within(launcher, f"{away}; sleep 0.3; exit 3") == (3, "")
    wait_for(lambda: not processes_with(mark))
    wait_for(lambda: KEY not in launcher.running())


@pytest.mark.e2e
def test_stop_ends_what_ignores_signals_and_hides(launcher, server):
    mark = f"hides-{os.getpid()}-{server.uid}"
    away = f"setsid env -i sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' {mark} & "
    job = Job(
        KEY, ("/bin/sh", "-c", f"{away} trap '' TERM; echo up; while :; do sleep 0.1; done"), confine="must"
    )
    launcher.prepare(job)
    launcher.start(job)
    wait_for(lambda: "up" in launcher.logs(KEY).text and processes_with(mark))
    assert launcher.status(KEY).state is JobState.RUNNING
    assert launcher.stop(KEY, 0.3)
    assert not processes_with(mark)


@pytest.mark.e2e
def test_a_job_writes_to_its_own_folder_and_where_the_cluster_lets_it(launcher, server, tmp_path):
    for name in ("data", "elsewhere"):
        (server.home / name).mkdir()
        os.chown(server.home / name, server.uid, server.uid)
    tried = """
    for path in $GPU_JOB_DIR /tmp ~/data ~ ~/elsewhere ~/.gpu-manager/jobs /etc /var/tmp; do
        touch $path/new 2>/dev/null && echo $path
    done
    directory=$(dirname $GPU_JOB_LOCK)
    for name in exit_code group log; do echo 0 2>/dev/null > $directory/$name; done
    ls ~/.gpu-manager/jobs
    touch $GPU_CHECKPOINT_FILE
    """
    launcher.prepare(Job("gpu-other-0a1b2c3d-1", ("true",)))
    code, output = within(launcher, f"({tried}) 2>/dev/null", writable=("~/data",))
    own = "/home/.gpu-manager/jobs/kept/gpu-train-0a1b2c3d"
    assert output.split() == [own, "/tmp", "/home/data", "/var/tmp", KEY, "kept"]
    assert code == 0
    assert launcher.status(KEY).checkpoint_at
    assert (server.home / "data/new").exists()
    assert not Path("/tmp/new").exists()


def test_a_job_types_nothing_into_the_terminal_of_its_caller(tmp_path, monkeypatch):
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    monkeypatch.setenv("GPU_JOB_LOCK", str(tmp_path / "job" / "lock"))
    (tmp_path / "job").mkdir()
    tried = """
import errno, fcntl, sys, termios
for request, argument in ((termios.TIOCSTI, b"x"), (0x541C, b"\\3"), (termios.TIOCGPGRP, bytes(4))):
    try:
        fcntl.ioctl(0, request, argument)
    except OSError as error:
        print(errno.errorcode[error.errno])
    else:
        print("done")
"""
    program = ["/usr/bin/python3", *walls.program_of((), (), "", ()), "/usr/bin/python3", "-c", tried]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(program[0], program)
    said = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 1024):
            said += part
    os.close(terminal)
    os.waitpid(process, 0)
    if b"cannot have its walls" in said:
        pytest.skip(said.decode())
    assert said.decode().split()[-3:] == ["EPERM", "EPERM", "done"], said


@pytest.mark.e2e
def test_no_program_gains_rights(launcher, server):
    shutil.copy("/usr/bin/id", server.home / "id")
    os.chown(server.home / "id", 0, 0)
    (server.home / "id").chmod(0o4755)
    code, output = within(launcher, "~/id -u; grep -E 'NoNewPrivs|CapEff|CapPrm' /proc/self/status; id -u")
    assert output.split() == [
        str(server.uid), "CapPrm:", "0" * 16, "CapEff:", "0" * 16, "NoNewPrivs:", "1", str(server.uid)
    ]  # fmt: skip
    assert code == 0


@pytest.mark.e2e
def test_no_socket_of_the_system_or_of_another_job_is_there(launcher, server):
    path = f"/run/walls-{os.getpid()}-{server.uid}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen()
        program = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
        try:
            _, output = within(launcher, f'/usr/bin/python3 -c "{program}" 2>&1 | tail -n 1')
        finally:
            os.unlink(path)
    assert "No such file" in output


@pytest.mark.e2e
def test_a_job_sees_and_signals_no_process_outside(launcher, server):
    tried = "ls -d /proc/[0-9]* | wc -l; kill -0 $OUTSIDE; echo $?"
    _, output = within(launcher, tried, environment={"OUTSIDE": str(server.process)})
    few, *_, answer = output.split()
    assert int(few) < 8
    assert answer == "1"


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["TERM", "USR2"])
def test_the_signal_of_a_preemption_reaches_the_command(launcher, name):
    command = f"trap 'cat $GPU_PREEMPT_FILE; exit 9' {name}; echo up; while :; do sleep 0.05; done"
    job = Job(KEY, ("/bin/sh", "-c", command), confine="must")
    launcher.prepare(job)
    launcher.start(job)
    wait_for(lambda: "up" in launcher.logs(KEY).text)
    ended = launcher.preempt(KEY, 20.0, name, wait_s=20.0)
    assert (ended.state, ended.exit_code, ended.preempted) == (JobState.FINISHED, 9, True)
    assert launcher.logs(KEY).text.endswith("20\n")


@pytest.mark.e2e
def test_a_preempted_job_that_goes_on_is_killed_after_its_grace(launcher, server):
    mark = f"goes-on-{os.getpid()}-{server.uid}"
    command = f"trap '' TERM; echo up; exec sh -c 'while :; do sleep 0.05; done' {mark}"
    job = Job(KEY, ("/bin/sh", "-c", command), confine="must")
    launcher.prepare(job)
    launcher.start(job)
    wait_for(lambda: "up" in launcher.logs(KEY).text)
    assert launcher.preempt(KEY, 0.5, wait_s=20.0).state is JobState.FINISHED
    assert not processes_with(mark)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 77", 77), ("kill -KILL $$", 137), ("kill -TERM $$", 143)]
)
def test_the_exit_code_is_that_of_the_command(launcher, command, code):
    assert within(launcher, command) == (code, "")


@pytest.mark.e2e
def test_a_command_that_does_not_exist_says_so(launcher):
    job = Job(KEY, ("no-such-command",), confine="must")
    launcher.prepare(job)
    launcher.start(job)
    assert wait_until_ended(launcher, KEY).exit_code == 127
    assert launcher.logs(KEY).text == f"{SAID}no-such-command: No such file or directory\n"


@pytest.mark.e2e
def test_a_job_that_was_stopped_is_not_started_within_walls(launcher):
    job = Job(KEY, ("/bin/sh", "-c", "echo ran"), confine="must")
    launcher.prepare(job)
    launcher.stop(KEY, 0.0)
    with pytest.raises(LauncherError, match="has ended already"):
        launcher.start(job)


@pytest.mark.e2e
def test_its_processes_are_told_to_be_the_jobs_from_outside(launcher, server):
    """The agent takes a process on a GPU for the lease that its environment names."""
    mark = f"told-{os.getpid()}-{server.uid}"
    command = ("/bin/sh", "-c", f"echo up; exec sh -c 'while :; do sleep 0.1; done' {mark}")
    job = Job(KEY, command, environment={"GPU_LEASE_ID": KEY}, confine="must")
    launcher.prepare(job)
    launcher.start(job)
    wait_for(lambda: "up" in launcher.logs(KEY).text)
    wait_for(lambda: len(processes_with(mark)) == 1)
    (process,) = processes_with(mark)
    environment = Path(f"/proc/{process}/environ").read_bytes()
    assert f"GPU_LEASE_ID={KEY}".encode() in environment.split(b"\0")
    assert launcher.running() == [KEY]


@pytest.mark.e2e
@pytest.mark.parametrize("confine", ["try", "must"])
def test_where_bwrap_fails_the_walls_are_missing(launcher, server, confine):
    folder = server.home / "bin"
    folder.mkdir()
    (folder / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (folder / "bwrap").chmod(0o755)
    server.path = f"/home/bin:{server.path}"
    refused_or_without_walls(launcher, confine, "bwrap fails: bwrap: No permissions to create new namespace")


def refused_or_without_walls(launcher, confine, reason):
    """See that a job that must have walls does not start, and that another one says that it has none."""
    job = Job(KEY, ("/bin/sh", "-c", "echo ran"), confine=confine)
    if confine == "must":
        with pytest.raises(LauncherError, match=rf"confines its jobs \(confine = must\), but {reason}$"):
            launcher.prepare(job)
        return
    assert launcher.prepare(job).walls == f"none: {reason}"
    launcher.start(job)
    assert wait_until_ended(launcher, KEY).exit_code == 0
    assert launcher.logs(KEY).text == f"gpu-manager: walls: none: {reason}\nran\n"


@pytest.fixture
def local(tmp_path):
    launcher = LocalLauncher(str(tmp_path))
    yield launcher
    launcher.stop(KEY, 0.0)


@pytest.mark.parametrize("confine", ["try", "must"])
def test_without_bwrap_the_walls_are_missing(local, monkeypatch, tmp_path, confine):
    (tmp_path / "empty").mkdir()
    for name in ("sh", "mv"):
        (tmp_path / "empty" / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    refused_or_without_walls(local, confine, "bwrap is missing: install bubblewrap")


def test_walls_stand_on_this_machine(local):
    """The small case beside those for which namespaces and accounts are made."""
    job = Job(KEY, ("/bin/sh", "-c", "touch /etc/walls 2>/dev/null; echo $?; ls /dev; exit 3"), confine="try")
    if local.prepare(job).walls != "bubblewrap":
        pytest.skip("needs bubblewrap, and namespaces that this user may make")
    local.start(job)
    assert wait_until_ended(local, KEY).exit_code == 3
    said, failed, *devices = local.logs(KEY).text.splitlines()
    assert (f"{said}\n", failed) == (SAID, "1")
    assert set(devices) >= {"null", "zero", "shm"}
    assert not {name for name in devices if name.startswith(("sd", "nvidia", "kvm", "loop", "fuse"))}


CGROUP = """
import ctypes, errno, os, threading
libc = ctypes.CDLL(None, use_errno=True)
USER, MOUNT, CGROUP = 0x10000000, 0x00020000, 0x02000000
def tried(returned):
    return errno.errorcode[ctypes.get_errno()] if returned else "done"
clone, clone3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[os.uname().machine]
print(tried(libc.syscall(clone, USER | CGROUP | 17, None, None, None, None)))
print(tried(libc.syscall(clone3, None, 0)))
print(tried(libc.unshare(USER | MOUNT | CGROUP)))
print(tried(libc.unshare(USER | MOUNT)))
os.mkdir(os.environ["GPU_JOB_DIR"] + "/mounted")
print(tried(libc.mount(b"x", os.environb[b"GPU_JOB_DIR"] + b"/mounted", b"cgroup2", 0, None)))
threading.Thread(target=print, args=["thread"]).start()
"""


@pytest.mark.parametrize("place", ["home", "tmp", "working directory"])
def test_walls_stand_where_the_path_of_the_jobs_goes_through_a_link(tmp_path, monkeypatch, place):
    """As that of a home on another disk: nothing can be mounted upon a path with a link."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        disk, link = Path(folder) / "disk", (Path(folder) if place == "home" else tmp_path) / "link"
        monkeypatch.chdir(tmp_path if place == "working directory" else "/")
        disk.mkdir()
        link.symlink_to(disk)
        tried = f"ls {disk}/jobs; touch {disk}/jobs/no 2>/dev/null; echo $?; echo saved > $GPU_JOB_DIR/saved"
        job = Job(KEY, ("/bin/sh", "-c", f"{tried}; cat {disk}/jobs/kept/*/saved"), confine="try")
        if LocalLauncher(f"{disk}/plain").prepare(job).walls != "bubblewrap":
            pytest.skip("needs bubblewrap, and namespaces that this user may make")
        with closing(LocalLauncher(f"{link}/jobs")) as launcher:
            assert launcher.prepare(job).walls == "bubblewrap"
            launcher.start(job)
            wait_until_ended(launcher, KEY)
            text = launcher.logs(KEY).text
            launcher.stop(KEY, 0.0)
    assert text == f"{SAID}{KEY}\nkept\n1\nsaved\n", "it sees no other's folder"


def test_a_path_of_writable_above_the_folder_of_jobs_shows_no_other_job(tmp_path):
    """As the home, or the folder in which `gpu-manager run` begins."""
    root, other = tmp_path / "jobs", "gpu-other-0a1b2c3d-1"
    local = LocalLauncher(str(root))
    if local.prepare(Job(other, ("true",), confine="try")).walls != "bubblewrap":
        pytest.skip("needs bubblewrap, and namespaces that this user may make")
    tried = f"ls {root}; touch {tmp_path}/yes {root}/no {root}/{other}/no"
    job = Job(KEY, ("/bin/sh", "-c", f"({tried}) 2>/dev/null"), confine="try", writable=(str(tmp_path),))
    assert local.prepare(job).walls == "bubblewrap"
    local.start(job)
    wait_until_ended(local, KEY)
    text = local.logs(KEY).text
    local.stop(KEY, 0.0)
    assert text == f"{SAID}{KEY}\nkept\n"
    assert (tmp_path / "yes").exists()
    assert not [*root.rglob("no")]


def test_no_job_mounts_the_cgroup_of_its_agent_and_of_other_jobs(local):
    """Root owns `cgroup.kill` there without any capability."""
    job = Job(KEY, ("python3", "-c", CGROUP), confine="try")
    if local.prepare(job).walls != "bubblewrap":
        pytest.skip("needs bubblewrap, and namespaces that this user may make")
    local.start(job)
    wait_until_ended(local, KEY)
    said = ["EPERM", "ENOSYS", "EPERM", "done", "EPERM", "thread"]
    assert local.logs(KEY).text == SAID + "\n".join(said) + "\n"


def test_the_variables_of_a_job_choose_nothing_outside_its_walls(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bwrap").write_text(f"#!/bin/sh\ntouch {tmp_path}/escaped\n")
    (tmp_path / "bin/bwrap").chmod(0o755)
    (tmp_path / "data").mkdir()
    chosen = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "GPU_MANAGER_NVML": "/no/such/library",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "data"),
    }
    tried = f"touch {tmp_path}/data/new 2>/dev/null; echo $PATH $GPU_MANAGER_NVML $CUDA_MPS_PIPE_DIRECTORY"
    local = LocalLauncher(str(tmp_path / "jobs"))
    job = Job(KEY, ("/bin/sh", "-c", tried), chosen, confine="try")
    if local.prepare(job).walls != "bubblewrap":
        pytest.skip("needs bubblewrap, and namespaces that this user may make")
    local.start(job)
    wait_until_ended(local, KEY)
    assert local.logs(KEY).text == SAID + " ".join(chosen.values()) + "\n"
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "data/new").exists()
    local.stop(KEY, 0.0)


def test_what_builds_the_walls_does_not_get_the_variables_of_the_job(tmp_path):
    """The linker itself reads some, such as LD_PRELOAD, before any program could drop them."""
    walls = ["/bin/sh", "-c", 'echo "${LD_PRELOAD-none}"; exec "$@"', "sh"]
    starting.start(str(tmp_path), KEY, ["true"], {"LD_PRELOAD": "/no/such/library"}, walls=walls)
    wait_for(lambda: job_states.status(str(tmp_path), KEY)["state"] == "finished")
    assert job_states.logs(str(tmp_path), KEY)["text"] == "none\n"


OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.7.*/bin/python3"))


@pytest.mark.skipif(not OLD_PYTHONS, reason="needs a Python 3.7 of pyenv's")
def test_a_server_may_have_python_3_7(tmp_path):
    programs = ([*walls.telling("why"), "echo", "ran"], [*walls.program_of((), (), "", ()), walls.CHECK])
    by_old, by_own = (
        [
            subprocess.run(
                [python, *program],
                env={**os.environ, "GPU_JOB_LOCK": str(tmp_path / "lock")},
                capture_output=True,
                text=True,
            )
            for program in programs
        ]
        for python in (str(OLD_PYTHONS[0]), sys.executable)
    )
    assert (by_old[0].stdout, by_old[0].stderr) == ("ran\n", "gpu-manager: walls: none: why\n")
    assert [(each.returncode, each.stdout) for each in by_old] == [(0, each.stdout) for each in by_own]


def test_a_path_that_may_be_written_to_and_is_missing_is_said(local):
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    job = Job(KEY, ("true",), confine="must", writable=("/no/such/path",))
    with pytest.raises(LauncherError, match="but /no/such/path of writable does not exist"):
        local.prepare(job)


def test_a_job_without_walls_is_started_as_it_is(local):
    job = Job(KEY, ("/bin/sh", "-c", "echo ran"))
    assert local.prepare(job).walls == ""
    local.start(job)
    wait_until_ended(local, KEY)
    assert local.logs(KEY).text == "ran\n"


# ---- in a terminal, and in the session of an operator ----


@pytest.mark.e2e
def test_a_job_in_a_terminal_has_the_same_walls(tmp_path, monkeypatch):
    if shutil.which("bwrap") is None or os.geteuid() != 0:
        pytest.skip("needs bubblewrap and root")
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    (tmp_path / "code").mkdir()
    tried = "touch new /tmp/new && ! touch /etc/new && test $$ -lt 9 && exit 5"
    job = Job(KEY, ("/bin/sh", "-c", tried), confine="must")
    launcher = terminal.open_terminal(JobPlace("terminal", "root@localhost"), here=True)
    place = launcher.prepare(job)
    assert place.walls == "bubblewrap"
    attended = terminal.attend(place, job, here=True, working_dir=str(tmp_path / "code"))
    assert attended.wait(60) == 5
    assert (tmp_path / "code/new").exists()
    assert not Path("/tmp/new").exists()
    launcher.stop(KEY, 0.0)


@pytest.mark.e2e
def test_a_command_of_an_operators_session_has_the_same_walls(launcher, server):
    job = Job(KEY, (), confine="must", gpu_ids=(2,))
    assert launcher.prepare(job).walls == "bubblewrap"
    command = launcher.foreground(job, "cd /dev; ls -d nvidia?; touch ~/new; exit 4")
    done = subprocess.run(server.command("sh", "-c", command), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "nvidia2\n")
    assert done.stderr.startswith(SAID)
    assert "Read-only" in done.stderr
    assert launcher.status(KEY).exit_code == 4


# ---- device files ----


def test_nvidia_gpus_are_found_by_their_uuids(state):
    state.write(gpu(0, "minor 1"), gpu(1, "minor 0"))
    assert walls.nvidia_files([0], [uuid_of(0)]) == ["/dev/nvidia1"], "the driver numbers the files otherwise"
    assert walls.nvidia_files([0, 1], []) == ["/dev/nvidia1", "/dev/nvidia0"]
    with pytest.raises(walls.MissingError, match="knows no device file of GPU-gone"):
        walls.nvidia_files([0], ["GPU-gone"])


def test_a_mig_device_has_its_gpu_and_two_capabilities(state, tmp_path):
    state.write(gpu(0), gpu(1, "mig_mode 1"), mig(3, "1g.10gb", 10))
    known = {"config": 1, "gpu0/gi10/access": 3, "gpu1/gi10/access": 30, "gpu1/gi10/ci0/access": 31}
    minors = tmp_path / "minors"
    minors.write_text("".join(f"{part} {minor}\n" for part, minor in known.items()))
    assert walls.nvidia_files([0], [uuid_of(3, "MIG")], str(minors)) == [
        "/dev/nvidia1",
        "/dev/nvidia-caps/nvidia-cap30",
        "/dev/nvidia-caps/nvidia-cap31",
    ]


def test_without_nvidias_library_the_numbers_are_those_of_the_files(monkeypatch):
    monkeypatch.setenv("GPU_MANAGER_NVML", "/no/such/library")
    assert walls.nvidia_files([3, 1], ["GPU-3", "GPU-1"]) == ["/dev/nvidia3", "/dev/nvidia1"]


def test_gpus_of_amd_are_numbered_in_the_order_of_the_drivers_nodes(tmp_path):
    for node, minor in ((0, 0), (1, 128), (10, 136), (2, 129)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"simd_count 9\ndrm_render_minor {minor}\nname\n")
    assert walls.amd_files([0, 2, 7], str(tmp_path)) == ["/dev/dri/renderD128", "/dev/dri/renderD136"]


# ---- what is said ----


def test_the_lease_and_its_server_say_what_was_stated_and_what_was_achieved():
    cluster = {"confine": "try", "writable": ["/data"]}
    with GPUResourceManager.from_url("memory://", inventory=nodes("ab")) as manager:
        manager.read_reports_by(REPORTS)
        servers = [
            {"name": "a", "cpus": 8, "gpus": 4, "writable": ["~/.cache"]},
            {"name": "b", "cpus": 8, "gpus": 4, "confine": "must"},
        ]
        manager.apply(ClusterForm.model_validate({"cluster": cluster, "servers": servers}))
        lease = granted_lease(manager.submit("t", 2, server="a"))
        job = job_of(lease, KEY, ["true"])
        assert (job.confine, job.writable) == ("try", ("/data", "~/.cache"))
        assert [manager.server(name)["confine"] for name in "ab"] == ["try", "must"]
        place = JobPlace("ssh", "a", machine="a", folder="/f", walls="none: bwrap is missing")
        placed = manager.place_job("t", [place], fencing_token=lease["fencing_token"])
        assert [each["walls"] for each in placed["job_places"]] == ["none: bwrap is missing"]
        [first, *_] = manager.gpus(["a"])[0]["gpus"]
        assert [each["walls"] for each in first["leases"]] == ["none: bwrap is missing"]


# ---- users ----


def test_a_teams_jobs_run_as_its_user_or_not_at_all(local):
    with GPUResourceManager.from_url("memory://", inventory=nodes("ab")) as manager:
        servers = [
            {"name": "a", "cpus": 8, "gpus": 4, "address": "ada@gpu-a:2222"},
            {"name": "b", "cpus": 8, "gpus": 4, "address": "gpu-b"},
        ]
        teams = {"vision": {"user": "vision"}, "nlp": {}}
        manager.apply(ClusterForm.model_validate({"servers": servers, "teams": teams}))
        asked = [("t", "vision", "a"), ("u", "vision", "b"), ("v", "nlp", "a"), ("w", "", "b")]
        leases = [manager.submit(lease_id, 1, team=team, server=name) for lease_id, team, name in asked]
        reached = [granted_lease(lease)["members"][0]["address"] for lease in leases]
        assert reached == ["vision@gpu-a:2222", "vision@gpu-b", "ada@gpu-a:2222", "gpu-b"]
        assert [team["user"] for team in manager.teams()["teams"] if team["team"] == "vision"] == ["vision"]
        job = job_of(leases[0], KEY, ["true"])
    with pytest.raises(LauncherError, match="jobs of this team run as user vision, but on "):
        local.prepare(job)


@pytest.mark.parametrize(
    ("confine", "stated", "address", "is_refused"),
    [
        ("must", "", "", True),
        ("must", "", "ada@gpu-a", True),
        ("must", "root", "", False),
        ("must", "", "root@gpu-a", False),
        ("try", "", "", False),
        ("off", "", "", False),
    ],
)
def test_a_job_that_must_have_walls_is_roots_only_if_the_file_says_so(confine, stated, address, is_refused):
    job = Job(KEY, ("true",), confine=confine, user=stated)
    if is_refused:
        with pytest.raises(LauncherError, match="this one would run as root: state a user"):
            check_user(job, "root", address, "gpu-a")
    else:
        check_user(job, "root", address, "gpu-a")


def processes_with(text: str) -> list[int]:
    """Return the processes of this machine whose command line has that text, but for those that end."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if text.encode() in line and b"bwrap" not in line and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found
