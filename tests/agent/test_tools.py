"""Readers of the makers' tools, on texts in their documented formats, and a fake nvidia-smi on the PATH.

Sources of the formats: NVIDIA, `nvidia-smi --help-query-gpu`, `nvidia-smi -L`; AMD, "AMD SMI CLI tool usage"
(rocm.docs.amd.com/projects/amdsmi) and "ROCm SMI" with `--json`; Huawei, "npu-smi info" (hiascend.com,
npu-smi command reference).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent import probe
from resource_manager.agent.running import NoReportError, probe_here
from tests.nvml.standin import uuid_of


@pytest.fixture(autouse=True)
def _plain_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "process_of", lambda pid, mib: {"pid": pid, "memory_mib": mib})


def known(gpu: dict[str, Any], *without: str) -> dict[str, Any]:
    return {name: value for name, value in gpu.items() if value is not None and name not in without}


SMI = r"""#!/bin/sh
case "$*" in
*--query-gpu=*ecc.errors*) test -z "$OLD" || {
    echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2
  }
  cat "$TEXTS/gpus" ;;
*--query-gpu=*) cut -d, -f1-10 "$TEXTS/gpus" ;;
*--query-compute-apps=*) cat "$TEXTS/apps" ;;
*--query-remapped-rows=*) cat "$TEXTS/rows" ;;
-L) cat "$TEXTS/list" ;;
esac
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with what a fake nvidia-smi prints, on a machine without NVML."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("GPU_MANAGER_NVML", str(tmp_path / "none.so"))
    monkeypatch.setenv("TEXTS", str(tmp_path))
    (tmp_path / "gpus").write_text(
        f"0, {uuid_of(0)}, NVIDIA A100-SXM4-80GB, 550.54.15, 00000000:07:00.0, 81920, 1024, 71, 55, 250.50,"
        " 0, Disabled, 0x0000000000000044\n"
        f"1, {uuid_of(1)}, NVIDIA A100-SXM4-80GB, 550.54.15, 00000000:0F:00.0, 81920, 0, [N/A], 34,"
        " [Not Supported], [N/A], Enabled, 0x0000000000000000\n"
    )
    (tmp_path / "apps").write_text(f"{uuid_of(0)}, 1, 1000\n{uuid_of(0)}, [N/A], [N/A]\n")
    (tmp_path / "rows").write_text(f"{uuid_of(0)}, 1, 0\n{uuid_of(1)}, 0, 1\n")
    (tmp_path / "list").write_text(
        f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {uuid_of(0)})\n"
        f"GPU 1: NVIDIA A100-SXM4-80GB (UUID: {uuid_of(1)})\n"
        f"  MIG 1g.10gb     Device  0: (UUID: {uuid_of(0, 'MIG')})\n"
        f"  MIG 3g.40gb     Device  1: (UUID: {uuid_of(1, 'MIG')})\n"
    )
    return tmp_path


def test_nvidia_smi_is_asked_where_the_library_is_missing(texts: Path) -> None:
    report = probe_here()
    assert (report.source, report.driver) == ("nvidia-smi", "550.54.15")
    whole, *migs = (found.model_dump() for found in report.gpus)
    assert known(whole, "processes", "numa_node") == {
        "index": 0,
        "uuid": uuid_of(0),
        "type": "A100-SXM4-80GB",
        "vendor": "nvidia",
        "lost": False,
        "memory_mib": 81920,
        "memory_used_mib": 1024,
        "utilization_percent": 71,
        "temperature_c": 55,
        "power_w": 250.5,
        "ecc_uncorrected": 0,
        "throttle_reasons": ["software power cap", "hardware thermal slowdown"],
        "rows_pending": True,
        "rows_failed": False,
        "pci": "0000:07:00.0",
    }
    assert [(each["pid"], each["memory_mib"]) for each in whole["processes"]] == [(1, 1000)]
    assert [(each["index"], each["uuid"], each["type"], each["mig"]) for each in migs] == [
        (1, uuid_of(0, "MIG"), "A100-SXM4-80GB:1g.10gb", "1g.10gb"),
        (2, uuid_of(1, "MIG"), "A100-SXM4-80GB:3g.40gb", "3g.40gb"),
    ]
    unknown = ("memory_mib", "utilization_percent", "vendor_state")
    assert [migs[0][name] for name in unknown] == [None, None, None]
    assert migs[0]["rows_failed"] is True


def test_a_gpu_in_mig_mode_without_devices_says_so(texts: Path) -> None:
    (texts / "list").write_text(f"GPU 1: NVIDIA A100-SXM4-80GB (UUID: {uuid_of(1)})\n")
    found = [(each.uuid, each.vendor_state) for each in probe_here().gpus]
    assert found == [(uuid_of(0), None), (uuid_of(1), probe.EMPTY_MIG)]


@pytest.mark.parametrize(
    ("said", "lost", "action"),
    [("[GPU is lost]", True, None), ("[GPU requires reset]", False, "gpu reset")],
)
def test_a_gpu_that_nvidia_smi_cannot_ask_is_out_of_use(
    texts: Path, said: str, lost: bool, action: str | None
) -> None:
    """It names the GPU still, and says so in the place of what it measures: it passed as idle and healthy."""
    healthy = (texts / "gpus").read_text().splitlines()[0]
    uuid, cells = uuid_of(1), ", ".join([said] * 4)
    whole = f"1, {uuid}, NVIDIA A100, 550.54.15, 00000000:0F:00.0, 81920, 0, {cells}, [N/A], 0x0"
    (texts / "gpus").write_text(f"{whole}\n{healthy}\n{', '.join(['2', *[said] * 12])}\n")
    report = probe_here()
    first, second, third = report.gpus
    assert [(each.lost, each.recovery_action) for each in report.gpus] == [
        (lost, action),
        (False, None),
        (lost, action),
    ]
    assert (first.uuid, second.uuid, third.uuid) == (uuid, uuid_of(0), None)
    assert (first.processes, third.type, report.driver) == (None, "", "550.54.15")


@pytest.mark.parametrize("said", ["[Unknown Error]", "[N/A]", "ERR!"])
def test_a_gpu_whose_uuid_cannot_be_read_hides_no_other(texts: Path, said: str) -> None:
    """The report of the server was refused, so that it counted as silent with all of its GPUs."""
    text = (texts / "gpus").read_text().splitlines()[0]
    (texts / "gpus").write_text(f"{text}\n{text.replace(uuid_of(0), said)}\n")
    assert [each.uuid for each in probe_here().gpus] == [uuid_of(0), None]


def test_an_older_nvidia_smi_is_asked_for_less(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD", "1")
    first, second = (found.model_dump() for found in probe_here().gpus)
    assert (first["memory_mib"], first["power_w"], first["ecc_uncorrected"]) == (81920, 250.5, None)
    assert (second["utilization_percent"], second["throttle_reasons"]) == (None, None)


def test_what_a_failing_nvidia_smi_says_is_the_reason(texts: Path) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    (texts / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\nexit 18\n")
    with pytest.raises(NoReportError, match=f"nvidia-smi: {said}"):
        probe_here()


def test_what_a_tool_says_cannot_steer_a_terminal(texts: Path) -> None:
    (texts / "bin" / "nvidia-smi").write_text("#!/bin/sh\nprintf 'broken\\033[2J\\n'\nexit 1\n")
    with pytest.raises(NoReportError, match=r"nvidia-smi: broken\?\[2J"):
        probe_here()


AMD_STATIC = [
    {
        "gpu": 0,
        "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0xD128F8D6F1B5DF2A", "oam_id": 0},
        "bus": {"bdf": "0000:0C:00.0", "max_pcie_width": 16, "slot_type": "OAM"},
        "driver": {"name": "amdgpu", "version": "6.8.5"},
        "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
        "numa": {"node": 0, "affinity": 0},
    },
    {
        "gpu": 1,
        "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "N/A"},
        "bus": {"bdf": "0000:22:00.0"},
        "driver": {"name": "amdgpu", "version": "6.8.5"},
        "vram": {"size": {"value": 196592, "unit": "MB"}},
        "numa": {"node": "N/A"},
    },
]
AMD_METRIC = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 93, "unit": "%"}, "umc_activity": {"value": 12, "unit": "%"}},
        "power": {"socket_power": {"value": 612, "unit": "W"}},
        "temperature": {"edge": "N/A", "hotspot": {"value": 61, "unit": "C"}},
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": 2048, "unit": "MB"},
        },
        "ecc": {"total_correctable_count": 3, "total_uncorrectable_count": 1},
    },
    {"gpu": 1, "usage": "N/A", "power": {"socket_power": "N/A"}},
]
AMD_PROCESS = [
    {
        "gpu": 0,
        "process_list": [
            {
                "process_info": {
                    "name": "python3",
                    "pid": 4242,
                    "memory_usage": {"vram_mem": {"value": 1073741824, "unit": "B"}},
                }
            }
        ],
    },
    {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
]


@pytest.mark.parametrize("since_rocm_7", [False, True])
def test_amd_smi(since_rocm_7: bool) -> None:
    static, metric, processes = (
        json.dumps({"gpu_data": part} if since_rocm_7 else part)
        for part in (AMD_STATIC, AMD_METRIC, AMD_PROCESS)
    )
    driver, (first, second) = probe.read_amd_smi(static, metric, processes)
    assert driver == "6.8.5"
    assert known(first) == {
        "index": 0,
        "uuid": "GPU-d128f8d6f1b5df2a",
        "type": "Instinct MI300X",
        "vendor": "amd",
        "lost": False,
        "memory_mib": 196592,
        "memory_used_mib": 2048,
        "utilization_percent": 93,
        "temperature_c": 61,
        "power_w": 612.0,
        "ecc_uncorrected": 1,
        "pci": "0000:0c:00.0",
        "numa_node": 0,
        "processes": [{"pid": 4242, "memory_mib": 1024}],
    }
    assert known(second, "numa_node") == {
        "index": 1,
        "type": "Instinct MI300X",
        "vendor": "amd",
        "lost": False,
        "memory_mib": 196592,
        "pci": "0000:22:00.0",
        "processes": [],
    }


ROCM = json.dumps(
    {
        "card1": {"Card series": "Navi 21", "Unique ID": "N/A", "GPU use (%)": "0"},
        "card0": {
            "Unique ID": "0x8f2d9c1b4e7a6035",
            "Temperature (Sensor edge) (C)": "35.0",
            "Temperature (Sensor junction) (C)": "38.0",
            "Average Graphics Package Power (W)": "41.0",
            "GPU use (%)": "7",
            "VRAM Total Memory (B)": "68702699520",
            "VRAM Total Used Memory (B)": "10960896",
            "PCI Bus": "0000:63:00.0",
            "Card Series": "AMD Instinct MI210",
        },
        "system": {"Driver version": "6.3.6"},
    }
)


def test_rocm_smi() -> None:
    driver, (first, second) = probe.read_rocm_smi(f"WARNING: power is low\n{ROCM}")
    assert driver == "6.3.6"
    assert known(first, "numa_node") == {
        "index": 0,
        "uuid": "GPU-8f2d9c1b4e7a6035",
        "type": "Instinct MI210",
        "vendor": "amd",
        "lost": False,
        "memory_mib": 65520,
        "memory_used_mib": 10,
        "utilization_percent": 7,
        "temperature_c": 38,
        "power_w": 41.0,
        "pci": "0000:63:00.0",
    }
    assert (second["index"], second["type"], second["uuid"], second["processes"]) == (
        1,
        "Navi 21",
        None,
        None,
    )


NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.2.1                 Version: 23.0.2.1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 94.8        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 87          0    / 0          4148 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Alarm         | 91.0        36                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3401 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 1333928       | python3                  | 37709                   |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""

OLD_NPU = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                                       Version: 25.2.0                                   |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | OK              | 10.4          66                15    / 15           |
| 0       0                     | NA              | 0            957   / 10810                           |
+===============================+=================+======================================================+
"""


def test_npu_smi() -> None:
    driver, (first, second) = probe.read_npu_smi(NPU)
    assert driver == "23.0.2.1"
    assert known(first, "numa_node") == {
        "index": 0,
        "type": "910B3",
        "vendor": "ascend",
        "lost": False,
        "memory_mib": 65536,
        "memory_used_mib": 4148,
        "utilization_percent": 87,
        "temperature_c": 41,
        "power_w": 94.8,
        "pci": "0000:c1:00.0",
        "processes": [{"pid": 1333928, "memory_mib": 37709}],
    }
    assert (second["vendor_state"], second["processes"]) == ("alarm", [])


def test_npu_smi_without_hbm_and_processes() -> None:
    driver, [only] = probe.read_npu_smi(OLD_NPU)
    assert driver == "25.2.0"
    assert (only["memory_mib"], only["memory_used_mib"], only["pci"]) == (10810, 957, None)
    assert only["processes"] is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("00000000:07:00.0", "0000:07:00.0"),
        ("0001A000:0F:00.0", "1a000:0f:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("NA", None),
        ("", None),
    ],
)
def test_a_pci_address_is_written_as_linux_writes_it(address: str, expected: str | None) -> None:
    assert probe.plain_pci(address) == expected
