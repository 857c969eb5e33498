"""The parsers of what servers say: reports, the texts of the makers' tools, and the health table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resource_manager.agent import probe
from resource_manager.agent.health import load_health_table
from resource_manager.agent.inventory import Discovered, inventory_toml
from resource_manager.agent.reports import read_report
from resource_manager.agent.running import NoReportError, read_answer
from resource_manager.manager.inventory_file import load_inventory
from tests.agent import test_tools as texts
from tests.fuzz.parser import Parser, file

REPORT = json.dumps(
    {
        **probe.server_report("nvml", "550.54.15", [], None),
        "server": "gpu-a",
        "gpus": [
            probe.gpu_of(
                0,
                uuid="GPU-8f6a2c1e",
                type="A100",
                memory_mib=81920,
                utilization_percent=7,
                power_w=61.5,
                pci="0000:07:00.0",
                numa_node=0,
                throttle_reasons=["hardware slowdown"],
                xids=[{"xid": 79, "count": 2, "at": 1.5}],
                processes=[
                    {
                        "pid": 7,
                        "user": "ada",
                        "command": "python",
                        "memory_mib": 1,
                        "lease_id": "t",
                        "job": None,
                        "lease_source": "environment",
                    }
                ],
            ),
            probe.gpu_of(1, lost=True),
        ],
    }
).encode()
HEALTH = b'[[conditions]]\ncondition = "xid 63"\naction = "ignore"\ntext = "as NVIDIA says"\ntodo = "no"\n'


def read_discovered(data: bytes, folder: Path) -> object:
    """A report that is taken makes an inventory that can be read."""
    report = read_report(data)
    (folder / "i.toml").write_text(inventory_toml([Discovered("", report)]), encoding="utf-8")
    return load_inventory(folder / "i.toml")


def tool(read: Callable[[str], tuple[str | None, list[probe.Gpu]]]) -> Callable[[bytes, Path], object]:
    """A reader in the probe, whose error becomes the reason of a report."""

    def parse(data: bytes, folder: Path) -> object:
        text = data.decode("utf-8", "replace")
        try:
            return probe.ask_tool("the tool", lambda _: read(text), process)
        except probe.ProbeError as error:
            raise NoReportError(str(error)) from error

    return parse


def process(pid: int, memory_mib: int | None) -> dict[str, Any]:
    return {"pid": pid, "memory_mib": memory_mib}


def read_amd(text: str) -> tuple[str | None, list[probe.Gpu]]:
    parts = text.split("\0")
    parts += ["[]"] * (3 - len(parts))
    return probe.read_amd_smi(*parts[:3], process)


def parsers() -> dict[str, Parser]:
    amd = "\0".join(map(json.dumps, (texts.AMD_STATIC, texts.AMD_METRIC, texts.AMD_PROCESS)))
    return {
        "report": Parser(read_discovered, (REPORT,)),
        "answer": Parser(
            lambda data, folder: read_answer(0, data.decode("utf-8", "replace"), ""), (b"motd\n" + REPORT,)
        ),
        "health": Parser(file("h.toml", load_health_table), (HEALTH,)),
        "amd_smi": Parser(tool(read_amd), (amd.encode(),)),
        "rocm_smi": Parser(tool(probe.read_rocm_smi), (texts.ROCM.encode(),)),
        "npu_smi": Parser(
            tool(lambda text: probe.read_npu_smi(text, process)), (texts.NPU.encode(), texts.OLD_NPU.encode())
        ),
    }
