"""The stand-in is true to NVIDIA's interface: to its header, and to the programs that use the library."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvml.standin import State, compile_library, gpu, library, mig, state, uuid_of

__all__ = ["library", "state"]


def nvml_header() -> Path:
    """Return the folder of NVIDIA's nvml.h, which the package nvidia-nvml-dev installs."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for header in Path(folder).glob("*/include/nvml.h"):
            return header.parent
    pytest.skip("needs nvidia-nvml-dev")


def layout(path: Path) -> dict[str, int]:
    show = ctypes.CDLL(str(path)).standin_layout
    show.restype = ctypes.c_char_p
    return {name: int(size) for name, size in map(str.split, show().decode().splitlines())}


def test_types_and_functions_are_those_of_the_header(library: Path, tmp_path: Path) -> None:
    """With -DWITH_NVML_H the compiler compares each function with its prototype, as an error."""
    header = nvml_header()
    real = compile_library(tmp_path, "-DWITH_NVML_H", f"-I{header}", "-Wno-sign-compare")
    own = layout(library)
    assert own == layout(real)
    assert own["nvmlPciInfo_t"] == 68
    assert own["nvmlProcessInfo_t"] == 24
    assert len(own) > 20


def test_the_structs_of_the_probe_are_those_of_the_header(library: Path) -> None:
    from resource_manager.agent import probe

    own = layout(library)
    structs = {
        "nvmlPciInfo_t": (probe.PciInfo, {"busId": "address", "bus": "bus"}),
        "nvmlMemory_t": (probe.Memory, {"used": "used"}),
        "nvmlMemory_v2_t": (probe.MemoryV2, {"total": "total", "reserved": "reserved", "used": "used"}),
        "nvmlUtilization_t": (probe.Utilization, {"memory": "memory"}),
        "nvmlProcessInfo_v1_t": (probe.ProcessV1, {"usedGpuMemory": "memory"}),
        "nvmlProcessInfo_t": (probe.Process, {"gpuInstanceId": "gpu_instance"}),
        "nvmlDeviceAttributes_t": (
            probe.Attributes,
            {"gpuInstanceSliceCount": "gpu_slices", "memorySizeMB": "memory_mib"},
        ),
        "nvmlFieldValue_t": (probe.FieldValue, {"nvmlReturn": "code", "value": "value"}),
        "nvmlEventData_t": (probe.EventData, {"eventType": "type", "eventData": "data"}),
    }
    for name, (struct, members) in structs.items():
        assert ctypes.sizeof(struct) == own[name], name
        for member, field in members.items():
            assert getattr(struct, field).offset == own[f"{name}.{member}"], f"{name}.{member}"


def run(state: State, *command: str) -> str:
    done = subprocess.run(command, env=state.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nvidias_own_python_bindings_read_it(state: State) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    state.write(
        gpu(0, "memory 85899345920 1073741824 637534208", "utilization 71 40", "process 1 1048576000"),
        gpu(1, "rows 1 2 1 0", "mig_mode 1"),
        mig(0, "1g.10gb", 10),
        gpu(2, "lost"),
    )
    program = """
import pynvml as n
n.nvmlInit()
print(n.nvmlSystemGetDriverVersion(), n.nvmlDeviceGetCount())
one = n.nvmlDeviceGetHandleByIndex(0)
print(n.nvmlDeviceGetUUID(one), n.nvmlDeviceGetName(one), n.nvmlDeviceGetPciInfo(one).busId)
memory = n.nvmlDeviceGetMemoryInfo(one, version=n.nvmlMemory_v2)
print(memory.used >> 20, memory.reserved >> 20, n.nvmlDeviceGetUtilizationRates(one).gpu)
[process] = n.nvmlDeviceGetComputeRunningProcesses(one)
print(process.pid, process.usedGpuMemory)
two = n.nvmlDeviceGetHandleByIndex(1)
print(n.nvmlDeviceGetRemappedRows(two), n.nvmlDeviceGetMigMode(two))
part = n.nvmlDeviceGetMigDeviceHandleByIndex(two, 0)
print(n.nvmlDeviceGetUUID(part), n.nvmlDeviceGetName(part), n.nvmlDeviceGetGpuInstanceId(part))
for call in (lambda: n.nvmlDeviceGetHandleByIndex(2), lambda: n.nvmlDeviceGetFanSpeed(one)):
    try:
        call()
    except n.NVMLError as error:
        print(type(error).__name__)
"""
    assert run(state, sys.executable, "-c", program).splitlines() == [
        "550.54.15 3",
        f"{uuid_of(0)} NVIDIA A100-SXM4-80GB 00000000:07:00.0",
        "1024 608 71",
        "1 1048576000",
        "(1, 2, 1, 0) [1, 1]",
        f"{uuid_of(0, 'MIG')} NVIDIA A100-SXM4-80GB MIG 1g.10gb 7",
        "NVMLError_GpuIsLost",
        "NVMLError_FunctionNotFound",
    ]


def test_events_come_once_while_a_program_runs(state: State) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    state.write(gpu(0, "event 1 xid 13"))
    program = """
import pynvml as n
n.nvmlInit()
one = n.nvmlDeviceGetHandleByIndex(0)
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(one, n.nvmlEventTypeXidCriticalError, events)
for _ in range(3):
    print("ready", flush=True)
    input()
    try:
        print(n.nvmlEventSetWait_v2(events, 0).eventData, flush=True)
    except n.NVMLError_Timeout:
        print("none", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=state.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for lines in (["event 1 xid 13"], ["event 1 xid 13", "event 2 xid 79"], ["event 2 xid 79"]):
            assert process.stdout.readline() == "ready\n"
            state.write(gpu(0, *lines))
            process.stdin.write("\n")
            process.stdin.flush()
            answers.append(process.stdout.readline().strip())
    assert answers == ["none", "79", "none"]


def test_gpustat_shows_it(state: State) -> None:
    pytest.importorskip("gpustat", reason="needs gpustat")
    state.write(
        gpu(
            0,
            "memory 85899345920 1073741824 637534208",
            "utilization 71 40",
            f"process {os.getpid()} 1048576000",
        ),
        gpu(1),
    )
    found = json.loads(run(state, sys.executable, "-m", "gpustat", "--json"))
    first, second = found["gpus"]
    assert (first["uuid"], first["name"]) == (uuid_of(0), "NVIDIA A100-SXM4-80GB")
    assert (first["utilization.gpu"], first["memory.used"], first["temperature.gpu"]) == (71, 1024, 34)
    assert first["processes"][0]["pid"] == os.getpid()
    assert second["processes"] == []
    assert found["driver_version"] == "550.54.15"


def test_nvitop_shows_it(state: State) -> None:
    pytest.importorskip("nvitop", reason="needs nvitop")
    state.write(gpu(0, "utilization 71 40", f"process {os.getpid()} 1048576000"), gpu(1))
    shown = run(state, sys.executable, "-m", "nvitop", "--once")
    assert "550.54.15" in shown
    assert "A100-SXM4-80GB" in shown
    assert "71%" in shown
    assert str(os.getpid()) in shown
