"""Probe on the stand-in for NVIDIA's library: what it reports, and what it does when the library fails."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent import probe
from resource_manager.agent.running import NoReportError, command, probe_here, program
from resource_manager.jobs.directories import job_files
from resource_manager.jobs.launchers import Job
from resource_manager.jobs.launchers.base import job_key
from resource_manager.jobs.launchers.local import LocalLauncher
from tests.eventually import wait_for
from tests.nvml.standin import State, compile_library, gpu, library, mig, state, uuid_of

__all__ = ["library", "state"]


def gpus() -> list[dict[str, Any]]:
    return [found.model_dump() for found in probe_here().gpus]


def test_every_field_of_a_gpu_is_read(state: State) -> None:
    state.write(
        gpu(
            1,
            "memory 85899345920 1073741824 637534208",
            "utilization 71 40",
            "temperature 55",
            "power 250500",
            "energy 987654321",
            "ecc 3",
            "rows 0 1 1 0",
            "pages_pending 0",
            "clocks 0x4d",
            "numa 3",
            "recovery 4",
        )
    )
    [found] = gpus()
    assert found == {
        "index": 0,
        "uuid": uuid_of(1),
        "type": "A100-SXM4-80GB",
        "vendor": "nvidia",
        "lost": False,
        "mig": None,
        "memory_mib": 81920,
        "memory_used_mib": 1024,
        "utilization_percent": 71,
        "temperature_c": 55,
        "power_w": 250.5,
        "energy_mj": 987654321,
        "ecc_uncorrected": 3,
        "rows_pending": True,
        "rows_failed": False,
        "pages_pending": False,
        "throttle_reasons": ["software power cap", "hardware slowdown", "hardware thermal slowdown"],
        "recovery_action": "drain and reset",
        "xids": found["xids"],
        "pci": "0000:0f:00.0",
        "numa_node": 3,
        "nvlink_group": None,
        "vendor_state": None,
        "processes": [],
    }


def test_the_server_itself_is_described(state: State) -> None:
    report = probe_here()
    assert (report.format, report.source, report.driver) == (1, "nvml", "550.54.15")
    assert report.cpus == os.cpu_count()
    assert report.memory_mib is not None
    assert report.memory_available_mib is not None
    assert 0 < report.memory_available_mib < report.memory_mib
    assert report.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert abs(report.at - time.time()) < 60
    assert report.disk_free_mib is not None
    assert report.disk_free_mib > 0


def test_what_a_gpu_cannot_say_is_none_not_zero(state: State) -> None:
    state.write(["gpu", f"uuid {uuid_of(0)}", "name NVIDIA T4", "pci 00000000:07:00.0"])
    [found] = gpus()
    known = {name for name, value in found.items() if value is not None}
    assert known - {"xids", "numa_node"} == {"index", "uuid", "type", "vendor", "lost", "pci", "processes"}


def test_what_an_old_library_lacks_is_none_and_the_rest_is_read(state: State, tmp_path: Path) -> None:
    state.library = compile_library(tmp_path / "old", "-DOLD_DRIVER")
    os.environ.update(state.variables)
    state.write(gpu(0, "memory 85899345920 1073741824", f"process {os.getpid()} 1048576"))
    [found] = gpus()
    assert (found["rows_pending"], found["rows_failed"]) == (None, None)
    assert (found["memory_used_mib"], found["throttle_reasons"]) == (1024, [])
    assert [(each["pid"], each["memory_mib"]) for each in found["processes"]] == [(os.getpid(), 1)]


def test_mig_devices_stand_in_place_of_their_gpu(state: State) -> None:
    state.write(
        gpu(0, "mig_mode 1", "rows 0 0 1 0"),
        mig(0, "1g.10gb", 10),
        mig(1, "3g.40gb", 40, f"process {os.getpid()} 2097152"),
        gpu(1),
    )
    first, second, whole = gpus()
    assert [found["index"] for found in (first, second, whole)] == [0, 1, 2]
    assert [found["type"] for found in (first, second, whole)] == [
        "A100-SXM4-80GB:1g.10gb",
        "A100-SXM4-80GB:3g.40gb",
        "A100-SXM4-80GB",
    ]
    assert (first["uuid"], first["mig"], first["memory_mib"]) == (uuid_of(0, "MIG"), "1g.10gb", 10240)
    assert (first["utilization_percent"], first["power_w"]) == (None, None)
    assert (first["rows_pending"], whole["rows_pending"]) == (True, False)
    assert (first["processes"], [each["memory_mib"] for each in second["processes"]]) == ([], [2])
    assert (whole["uuid"], whole["mig"]) == (uuid_of(1), None)


def test_a_mig_profile_without_a_name_is_known_by_its_slices(state: State) -> None:
    state.write(gpu(0, "mig_mode 1"), mig(0, "2g.20gb", 20, "name NVIDIA A100"))
    assert [found["mig"] for found in gpus()] == ["2g.20gb"]


def test_a_gpu_in_mig_mode_without_devices_says_so(state: State) -> None:
    state.write(gpu(0, "mig_mode 1"), gpu(1))
    assert [(found["mig"], found["vendor_state"]) for found in gpus()] == [
        (None, "mig without devices"),
        (None, None),
    ]


def test_a_measurement_that_cannot_be_is_unknown(state: State) -> None:
    """Some devices give the largest integer instead of an error; the rest of the report is worth having."""
    state.write(gpu(0, "utilization 4294967295 0", "temperature 4294967295", "power 4294967295"))
    [found] = gpus()
    assert (found["utilization_percent"], found["temperature_c"], found["power_w"]) == (None, None, None)
    assert found["memory_mib"] == 81920


@pytest.mark.parametrize(
    ("links", "groups"),
    [
        (["", "", ""], [None, None, None]),
        (["nvlink 0 gpu 00000000:0F:00.0", "nvlink 3 gpu 00000000:07:00.0", ""], [0, 0, None]),
        (["nvlink 0 switch 00000000:C1:00.0", "", "nvlink 1 switch 00000000:C2:00.0"], [0, None, 0]),
        (["", "nvlink 0 gpu 00000000:17:00.0", "nvlink 0 gpu 00000000:0F:00.0"], [None, 0, 0]),
    ],
)
def test_gpus_that_nvlink_connects_are_a_group(
    state: State, links: list[str], groups: list[int | None]
) -> None:
    state.write(*(gpu(number, *[link] * bool(link)) for number, link in enumerate(links)))
    assert [found["nvlink_group"] for found in gpus()] == groups


def test_two_pairs_are_two_groups() -> None:
    links = {
        place: (f"0000:{place:02x}:00.0", {f"0000:{other:02x}:00.0"})
        for place, other in ((0, 3), (3, 0), (1, 2), (2, 1))
    }
    assert probe.nvlink_groups(links) == {0: 0, 3: 0, 1: 1, 2: 1}


def test_a_lost_gpu_is_reported_and_the_others_are_read(state: State) -> None:
    state.write(gpu(0), gpu(1, "lost"), gpu(2))
    assert [(found["lost"], found["uuid"]) for found in gpus()] == [
        (False, uuid_of(0)),
        (True, None),
        (False, uuid_of(2)),
    ]


@pytest.mark.parametrize(
    "name",
    ["nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses_v3"],
)
def test_a_gpu_that_answers_a_question_with_reset_required_needs_one(state: State, name: str) -> None:
    state.write(gpu(0), machine=[f"fail {name} 16"])
    assert [(found["recovery_action"], found["uuid"]) for found in gpus()] == [("gpu reset", uuid_of(0))]


def test_a_graver_recovery_action_is_not_lessened(state: State) -> None:
    state.write(gpu(0, "recovery 2"), machine=["fail nvmlDeviceGetComputeRunningProcesses_v3 16"])
    assert [found["recovery_action"] for found in gpus()] == ["node reboot"]


def test_a_gpu_that_needs_a_reset_or_permission_says_so(state: State) -> None:
    state.write(gpu(0), machine=["fail nvmlDeviceGetHandleByIndex_v2 16"])
    assert [found["recovery_action"] for found in gpus()] == ["gpu reset"]
    state.write(gpu(0), machine=["fail nvmlDeviceGetHandleByIndex_v2 4"])
    assert [found["vendor_state"] for found in gpus()] == ["Unknown Error (error 4)"]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("fail nvmlInit_v2 18", "Driver/library version mismatch .* reboot the server or reload"),
        ("fail nvmlInit_v2 9", "Driver Not Loaded .* load the nvidia kernel modules"),
        ("fail nvmlDeviceGetCount_v2 999", "nvmlDeviceGetCount_v2 of NVML: Unknown Error"),
        ("crash nvmlDeviceGetUtilizationRates", "crashed the probe: Segmentation fault"),
        ("crash nvmlInit_v2", "crashed the probe: Segmentation fault"),
    ],
)
def test_a_library_that_fails_is_a_reason_and_no_report(state: State, machine: str, reason: str) -> None:
    state.write(gpu(0), machine=[machine])
    with pytest.raises(NoReportError, match=reason) as caught:
        probe_here()
    assert "\n" not in str(caught.value)


def test_a_library_that_hangs_is_a_reason(state: State) -> None:
    state.write(gpu(0), machine=["hang nvmlDeviceGetTemperature"])
    text = program().replace("PROBE_TIMEOUT_S = 20.0", "PROBE_TIMEOUT_S = 0.5")
    done = subprocess.run([sys.executable, "-"], input=text.encode(), capture_output=True, timeout=60)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["error"], report["gpus"]) == ("no answer within 0.5 s: the GPU driver hangs", [])


def test_without_library_and_tools_the_reason_names_both(
    state: State, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPU_MANAGER_NVML", str(tmp_path / "none.so"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoReportError, match=r"none\.so.*none of nvidia-smi, amd-smi, rocm-smi, npu-smi"):
        probe_here()


def test_it_runs_as_a_program_on_standard_input_with_old_python(state: State) -> None:
    """As over ssh; the grammar is that of Python 3.9, whose library it keeps to."""
    ast.parse(program(), feature_version=(3, 9))
    done = subprocess.run([sys.executable, "-"], input=program().encode(), capture_output=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["driver"] == "550.54.15"


@pytest.fixture
def child() -> Iterator[Callable[..., int]]:
    """Function that starts a process with this environment, and a child in it, and returns the child's id."""
    started = []

    def start(**environment: str) -> int:
        inner = "import time; print('up', flush=True); time.sleep(600)"
        outer = (
            "import os, subprocess, sys; "
            f"child = subprocess.Popen([sys.executable, '-c', {inner!r}], env={{}}, stdout=subprocess.PIPE); "
            "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", outer],
            env={**{k: v for k, v in os.environ.items() if not k.startswith("GPU_")}, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        found = int(process.stdout.readline())
        started.append((process, found))
        return found

    yield start
    for process, found in started:
        os.kill(found, 9)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_process_is_known_with_its_lease(state: State, child: Callable[..., int]) -> None:
    below = child(GPU_LEASE_ID="lab:dag/run/train", GPU_JOB_LOCK="/home/u/jobs/gpu-train-0123abcd-7/lock")
    stray = child()
    own = int((Path("/proc") / str(below) / "stat").read_text().split()[3])
    state.write(gpu(0, f"process {own} 1048576", f"process {below}", f"process {stray} 3145728", "mps 1 5"))
    [found] = gpus()
    by_pid = {each["pid"]: each for each in found["processes"]}
    assert {pid: (each["lease_id"], each["job"], each["lease_source"]) for pid, each in by_pid.items()} == {
        own: ("lab:dag/run/train", "gpu-train-0123abcd-7", "environment"),
        below: ("lab:dag/run/train", "gpu-train-0123abcd-7", "ancestor"),
        stray: (None, None, "none"),
        1: (None, None, by_pid[1]["lease_source"]),
    }
    assert (by_pid[own]["memory_mib"], by_pid[below]["memory_mib"]) == (1, None)
    assert by_pid[below]["user"] == probe.user_name(os.getuid())
    assert "time.sleep(600)" in by_pid[below]["command"]
    assert len(by_pid[own]["command"]) <= probe.MAX_COMMAND


def test_a_job_that_only_draws_is_told_and_a_desktop_is_not(state: State, child: Callable[..., int]) -> None:
    """It is in no list of processes that compute: its lease would be idle, and its GPU clean."""
    job, both, desktop = child(GPU_LEASE_ID="t"), child(GPU_LEASE_ID="u"), child()
    lines = [f"graphics {pid} 2097152" for pid in (job, both, desktop)]
    whole = gpu(0, f"process {both} 1048576", *lines)
    state.write(whole)
    [found] = gpus()
    names = ("pid", "lease_id", "draws", "memory_mib")
    said = {tuple(process[name] for name in names) for process in found["processes"]}
    assert said == {(job, "t", True, 2), (both, "u", False, 1)}
    functions = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses")
    state.write(whole, machine=[f"fail {function} 3" for function in functions])
    assert [each["pid"] for each in gpus()[0]["processes"]] == [both], "where the library cannot say"


@pytest.mark.parametrize("lease_id", ["x" * 1025, "a\nb", "a\x1b[2J", "a\u202eb"])
def test_what_a_process_writes_into_its_environment_cannot_spoil_a_report(
    state: State, child: Callable[..., int], lease_id: str
) -> None:
    below = child(GPU_LEASE_ID=lease_id, GPU_JOB_LOCK=f"/home/u/{'j' * 200}\n/lock")
    state.write(gpu(0, f"process {below}", "process 0"))
    [process] = gpus()[0]["processes"]
    assert (process["pid"], process["lease_id"], process["job"]) == (below, None, None)


def test_a_process_that_registered_itself_is_known_with_all_that_it_starts() -> None:
    inner = "import time; print('up', flush=True); time.sleep(600)"
    outer = (
        "import subprocess, sys; from resource_manager.jobs.registered_process import register_process; "
        "register_process('of an earlier task', 41); register_process('lab:dag/run/train', 42); "
        f"child = subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GPU_")}
    with subprocess.Popen(
        [sys.executable, "-c", outer], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        found = [probe.owner_of(pid) for pid in (process.pid, child)]
        os.kill(child, 9)
    job = job_key("lab:dag/run/train", 42)
    assert found == [(None, job, "registration")] * 2
    assert probe.owner_of(process.pid) == (None, None, "unreadable"), "it went with the process"


def test_a_process_that_has_ended_is_unknown_not_foreign(state: State) -> None:
    state.write(gpu(0, "process 2147483646 1048576"))
    [process] = gpus()[0]["processes"]
    assert (process["user"], process["command"], process["lease_source"]) == (None, None, "unreadable")


def test_a_job_is_found_in_a_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/7/environ": "PATH=/bin",
        "/proc/7/status": "Name:\tpython\nPPid:\t1\n",
        "/proc/7/cgroup": "0::/system.slice/gpu-train-0123abcd-42.scope\n",
    }
    monkeypatch.setattr(probe, "read_text", texts.get)
    assert probe.owner_of(7) == (None, "gpu-train-0123abcd-42", "cgroup")
    texts["/proc/7/cgroup"] = "0::/gpu-train-0123abcd-42.3\n"
    assert probe.owner_of(7) == (None, "gpu-train-0123abcd-42.3", "cgroup"), "of a gang's member"


def test_xids_are_read_from_the_kernels_log() -> None:
    """Lines as in NVIDIA's XID documentation and in Documentation/ABI/testing/dev-kmsg."""
    lines = [
        "4,1021,60000000,-;NVRM: Xid (PCI:0000:07:00): 79, pid=1101, GPU has fallen off the bus.\n",
        "6,1022,61000000,-;usb 1-1: new device\n",
        "4,1023,62000000,-;NVRM: Xid (PCI:0000:0f:00.0): 13, pid=1, Graphics Exception\n",
        "4,1024,63000000,-;NVRM: Xid (PCI:0000:07:00): 79, pid=1101, name=python\n",
    ]
    xids = probe.kernel_xids(lines, boot_time=1000.0)
    assert xids == [("0000:07:00.0", 79, 1060.0), ("0000:0f:00.0", 13, 1062.0), ("0000:07:00.0", 79, 1063.0)]
    found = [probe.gpu_of(0, pci="0000:07:00.0"), probe.gpu_of(1, pci="0000:0f:00.0"), probe.gpu_of(2)]
    probe.add_xids(found, xids)
    assert [each["xids"] for each in found] == [
        [{"xid": 79, "count": 2, "at": 1063.0}],
        [{"xid": 13, "count": 1, "at": 1062.0}],
        [],
    ]


class Loop:
    """Probe that stays and answers each line with a report."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            command("--loop"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "\n"
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@pytest.fixture
def loop(state: State) -> Iterator[Loop]:
    made = Loop()
    yield made
    with made.process:
        assert made.process.stdin is not None
        made.process.stdin.close()
        assert made.process.wait(timeout=30) == 0


def test_a_running_probe_reports_each_xid_once_and_remembers_a_lost_gpu(state: State, loop: Loop) -> None:
    assert [found["xids"] for found in loop.ask()["gpus"]] == [[], []]
    state.write(gpu(0, "event 1 xid 31", "event 2 xid 31"), gpu(1, "event 3 xid 79", "lost"))
    one, two = loop.ask()["gpus"]
    assert [(each["xid"], each["count"]) for each in one["xids"]] == [(31, 2)]
    assert [(each["xid"], each["count"]) for each in two["xids"]] == [(79, 1)]
    assert (two["lost"], two["uuid"], two["pci"]) == (True, uuid_of(1), "0000:0f:00.0")
    assert [found["xids"] for found in loop.ask()["gpus"]] == [[], []]


def test_a_running_probe_survives_a_driver_that_comes_back(state: State, loop: Loop) -> None:
    assert len(loop.ask()["gpus"]) == 2
    state.write(gpu(0), machine=["fail nvmlDeviceGetCount_v2 9"])
    assert "Driver Not Loaded" in loop.ask()["error"]
    state.write(gpu(0))
    assert len(loop.ask()["gpus"]) == 1


def test_an_xid_storm_is_one_entry(state: State, loop: Loop) -> None:
    loop.ask()
    state.write(gpu(0, *(f"event {number} xid 13" for number in range(1, 41))), gpu(1))
    assert [(each["xid"], each["count"]) for each in loop.ask()["gpus"][0]["xids"]] == [(13, 40)]


def test_a_probe_of_eight_gpus_takes_little_time(state: State) -> None:
    """At most 0.3 s of processor time, which other work on the machine does not change."""
    state.write(*(gpu(number, "nvlink 0 switch 00000000:C1:00.0") for number in range(8)))
    before = os.times()
    assert len(gpus()) == 8
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used <= 0.3


def test_the_machine_has_the_name_that_places_of_jobs_have() -> None:
    assert probe.machine() == job_files.machine()


def test_jobs_are_found_by_their_lock_their_environment_and_their_registration(
    loop: Loop, tmp_path: Path
) -> None:
    """Also a job that computes on no GPU, and one of which a child is left without its variables."""
    launcher = LocalLauncher(str(tmp_path))
    keys = [job_key(f"found/{name}", 7) for name in ("job", "child", "mark", "registered")]
    hides = ("setsid", "env", "-i", "/bin/sleep", "300")
    launcher.start(Job(keys[0], ("sleep", "300")))
    launcher.start(Job(keys[1], ("sh", "-c", f"{' '.join(hides)} & exit")))
    marked = subprocess.Popen(["sleep", "300"], env={"GPU_JOB_LOCK": f"/gone/{keys[2]}/lock"})
    register = f"import os, time; kept = os.memfd_create({keys[3]!r}); print(flush=True); time.sleep(300)"
    registered = subprocess.Popen([sys.executable, "-c", register], stdout=subprocess.PIPE)
    try:
        assert registered.stdout is not None
        registered.stdout.readline()
        wait_for(lambda: set(keys) <= set(loop.ask("jobs")["jobs"]["keys"]), 20)
        assert "jobs" not in loop.ask()
        for process in (marked, registered):
            process.kill()
            process.wait()
        for key in keys[:2]:
            launcher.stop(key, 0.0)
        assert not set(keys) & set(loop.ask("jobs")["jobs"]["keys"])
    finally:
        for process in (marked, registered):
            process.kill()
            process.wait()
        if registered.stdout is not None:
            registered.stdout.close()
        for key in keys[:2]:
            launcher.stop(key, 0.0)


def test_a_cgroup_whose_name_is_no_text_hides_no_job(loop: Loop, tmp_path: Path) -> None:
    for group in (b"/sys/fs/cgroup/pids/t\xff", b"/sys/fs/cgroup/t\xff"):  # of version 1, of version 2
        with suppress(OSError):
            os.mkdir(group)
            break
    else:
        pytest.skip("needs the right to make a cgroup")
    key = job_key("grouped", 7)
    launcher = LocalLauncher(str(tmp_path))
    try:
        launcher.start(Job(key, ("sh", "-c", f"echo $$ > {os.fsdecode(group)}/cgroup.procs; exec sleep 300")))
        in_group = Path(os.fsdecode(group)) / "cgroup.procs"
        wait_for(lambda: in_group.read_text() != "")
        assert key in loop.ask("jobs")["jobs"]["keys"]
    finally:
        launcher.stop(key, 0.0)
        wait_for(lambda: in_group.read_text() == "")
        os.rmdir(group)


def hidden(pid: str) -> set[str]:
    """Return no jobs, of a process that may not be read if it is this one."""
    if pid == str(os.getpid()):
        raise PermissionError
    return set()


@pytest.mark.parametrize(
    ("sees_all", "jobs_of", "timeout_s", "is_complete"),
    [
        (True, lambda pid: set(), 60.0, True),
        (True, hidden, 60.0, False),
        (False, lambda pid: set(), 60.0, False),
        (True, lambda pid: set(), -1.0, False),
    ],
    ids=["all", "one that could not be read", "not all are seen", "time was over"],
)
def test_a_list_of_jobs_is_complete_if_each_process_could_be_read_in_time(
    sees_all: bool,
    jobs_of: Callable[[str], set[str]],
    timeout_s: float,
    is_complete: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "sees_all_processes", lambda: sees_all)
    monkeypatch.setattr(probe, "jobs_of", jobs_of)
    assert probe.live_jobs(timeout_s)["complete"] == is_complete
