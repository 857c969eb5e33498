"""The parsers of what servers say: reports, the texts of the makers' tools, and the health table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resource_manager.agent import probe
from resource_manager.agent.report_format import check_report, read_report
from resource_manager.agent.running import NoReportError, read_answer
from resource_manager.core.models import JobPlace
from resource_manager.fleet.health import health_table
from resource_manager.fleet.inventory_text import Discovered, inventory_toml
from resource_manager.fleet.records import Record, record_from_json, record_to_json
from resource_manager.jobs.launchers import Job
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.manager.cluster_file.reading import load_health, load_inventory
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
HEALTH = b'[health]\n"xid 64" = "note"\n[health."xid 63"]\naction = "ignore"\ntext = "as said"\ntodo = "no"\n'


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
            return probe.ask_tool("the tool", lambda: read(text))
        except probe.ProbeError as error:
            raise NoReportError(str(error)) from error

    return parse


def read_amd(text: str) -> tuple[str | None, list[probe.Gpu]]:
    static, metric, processes = [*text.split("\0"), "[]", "[]"][:3]
    return probe.read_amd_smi(static, metric, processes)


def read_nvidia(text: str) -> tuple[str | None, list[probe.Gpu]]:
    """The texts of nvidia-smi, apart at NUL, as a report that is then checked."""
    gpus_csv, apps, rows, listed = [*text.split("\0"), "", "", ""][:4]
    names = f"{probe.NVIDIA_FIELDS},{probe.NEWER_NVIDIA_FIELDS}".split(",")
    driver, gpus = probe.read_nvidia_smi(names, gpus_csv, apps, rows, lambda: listed)
    check_report(json.loads(json.dumps(probe.server_report("nvidia-smi", driver, gpus))))
    return driver, gpus


NVIDIA = """0, GPU-1, NVIDIA A100, 550.54, 00000000:07:00.0, 81920, 1024, 71, 55, 250.50, 0, Disabled, 0x44
1, GPU-2, NVIDIA A100, 550.54, 00000000:0F:00.0, 81920, 0, [N/A], 34, [N/A], [N/A], Enabled, 0x00
\0GPU-1, 1, 1000
\0GPU-1, 1, 0
\0GPU 1: NVIDIA A100 (UUID: GPU-2)
  MIG 1g.10gb     Device  0: (UUID: MIG-1)
"""


def read_ssh(data: bytes, folder: Path) -> object:
    """What a server answers about a job, one line a call."""
    answers = (data.decode("utf-8", "replace").split("\n") * 3)[:3]
    status, logs, prepare = (SSHLauncher(JobPlace("ssh", "h"), Answering(text)) for text in answers)
    return status.status("k"), logs.logs("k"), prepare.prepare(Job("k", ("true",)))


@dataclass
class Answering:
    """Server that gives one answer."""

    answer: str
    host: str = "h"

    def run(self, program: str, timeout_s: float, library: str = "") -> tuple[int, str, str]:
        return 0, self.answer, self.answer


STATUS = (
    b'{"state": "running", "exit_code": null, "ended_at": 1.5, "checkpoint_at": null, "preempted": false}'
)
PREPARED = (
    b'{"running": ["gpu-t-00000000-1"], "machine": "m", "folder": "/f", "mark": "1", "user": "u"'
    b', "walls": ""}'
)
ANSWERS = b'%s\n{"text": "x", "offset": 1, "status": %s}\n%s' % (STATUS, STATUS, PREPARED)


def parsers() -> dict[str, Parser]:
    amd = "\0".join(map(json.dumps, (texts.AMD_STATIC, texts.AMD_METRIC, texts.AMD_PROCESS)))
    return {
        "report": Parser(read_discovered, (REPORT, b'{"a\\nb": 1, ' + REPORT[1:])),
        "answer": Parser(
            lambda data, folder: read_answer(0, data.decode("utf-8", "replace"), ""), (b"motd\n" + REPORT,)
        ),
        "health": Parser(
            file("h.toml", lambda path: health_table(load_health(path))), (HEALTH, b'"a\\n\\u001bb" = 1\n')
        ),
        "amd_smi": Parser(tool(read_amd), (amd.encode(),)),
        "nvidia_smi": Parser(tool(read_nvidia), (NVIDIA.encode(),)),
        "ssh": Parser(read_ssh, (ANSWERS,)),
        "record": Parser(
            lambda data, folder: record_from_json(data),
            (record_to_json(Record(2.0, 10.0, 1.0, "b", 3.0, "h")),),
        ),
        "rocm_smi": Parser(tool(probe.read_rocm_smi), (texts.ROCM.encode(),)),
        "npu_smi": Parser(tool(probe.read_npu_smi), (texts.NPU.encode(), texts.OLD_NPU.encode())),
    }
