"""Reports are checked before anything else looks at them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from resource_manager.agent import probe
from resource_manager.agent.report_format import ReportError, check_report, read_report
from resource_manager.core.identifiers import UNPRINTABLE
from resource_manager.manager.cluster_file.servers import MAX_GPUS_OF_SERVER

Report = dict[str, Any]

PROCESS = {
    "pid": 7,
    "user": "ada",
    "command": "python train.py",
    "memory_mib": 10,
    "lease_id": None,
    "job": None,
    "lease_source": "none",
    "draws": False,
}

RUN = {
    **dict.fromkeys(("exit_code", "ended_at", "checkpoint_at", "want", "n", "error", "refusal", "began")),
    **dict.fromkeys(("last_line", "walls"), ""),
    "key": "gpu-t-7",
    "state": "finished",
    "preempted": False,
    "ended": True,
}


def report(*gpus: dict[str, Any], **other: Any) -> Report:
    made = probe.server_report("nvml", "550.54.15", [])
    return {**made, "server": "gpu-a", "gpus": list(gpus or [probe.gpu_of(0, uuid="GPU-1")]), **other}


def test_what_the_probe_makes_is_accepted() -> None:
    made = report(probe.gpu_of(0, processes=[PROCESS], xids=[{"xid": 79, "count": 1, "at": 1.5}]))
    found = read_report(json.dumps(made))
    agents_own = dict.fromkeys(
        ("interval_s", "jobs", "version", "generation", "mps", "mps_error", "place", "runs")
    )
    assert found.model_dump() == {**made, **agents_own}, "only an agent has them"
    older = {name: value for name, value in made.items() if name != "machine"}
    assert read_report(json.dumps(older)).machine is None
    listed = read_report(json.dumps({**made, "jobs": {"keys": ["gpu-t-0a1b2c3d-7"], "complete": True}}))
    assert listed.jobs is not None
    assert listed.jobs.complete
    assert found.gpus[0].utilization_percent is None


def of_gpu(**values: Any) -> Callable[[], Report]:
    return lambda: report(probe.gpu_of(0, **values))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (list, "report: not a JSON object"),
        (lambda: report(format=2), "format '2'; this version reads format 1: upgrade the service before"),
        (lambda: report(format=0), "format '0'; this version reads format 1$"),
        (lambda: report(format=None), "format 'None'"),
        (lambda: report(format=2, gpus="anything"), "upgrade the service"),
        (lambda: report(*(probe.gpu_of(i) for i in range(10_000))), "10,000 GPUs; a server has at most"),
        (lambda: report(probe.gpu_of(0), probe.gpu_of(0)), "two GPUs have one index"),
        (lambda: report(probe.gpu_of(0, uuid="A"), probe.gpu_of(1, uuid="A")), "one UUID"),
        (of_gpu(power_w=float("nan")), r"gpus\.0\.power_w: .*finite"),
        (of_gpu(power_w=float("inf")), r"gpus\.0\.power_w"),
        (lambda: report(at=float("nan")), r"report: at: "),
        (of_gpu(memory_mib=-1), r"gpus\.0\.memory_mib: "),
        (of_gpu(memory_mib="80"), r"gpus\.0\.memory_mib: .*integer"),
        (of_gpu(memory_mib=10**30), r"gpus\.0\.memory_mib: "),
        (of_gpu(utilization_percent=101), r"gpus\.0\.utilization_percent: "),
        (of_gpu(uuid="GPU-1\nGPU-2"), r"gpus\.0\.uuid: "),
        (of_gpu(uuid="x" * 97), r"gpus\.0\.uuid: "),
        (of_gpu(pci="7"), r"gpus\.0\.pci: "),
        (of_gpu(vendor="matrox"), r"gpus\.0\.vendor: "),
        (of_gpu(cost=1), r"gpus\.0\.cost: Extra"),
        (of_gpu(type="A100\x1b[2J"), r"gpus\.0\.type: "),
        (of_gpu(processes=[{**PROCESS, "pid": 0}]), r"gpus\.0\.processes\.0\.pid: "),
        (of_gpu(processes=[{**PROCESS, "command": "a\u202eb"}]), r"processes\.0\.command: "),
        (of_gpu(processes=[PROCESS] * 5000), r"gpus\.0\.processes: "),
        (of_gpu(xids=[{"xid": 79, "count": 0, "at": 1.0}]), r"gpus\.0\.xids\.0\.count: "),
        (lambda: report(runs=[{**RUN, "exit_code": 2**63}]), r"runs\.0\.exit_code: "),
        (lambda: report(server="a b"), "report: server: "),
        (lambda: report(server=""), "report: server: "),
        (lambda: {name: value for name, value in report().items() if name != "gpus"}, "report: gpus: "),
    ],
)
def test_a_wrong_report_is_refused_in_one_line(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(ReportError, match=line) as caught:
        check_report(make())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_json_text_with_nan_is_refused() -> None:
    text = json.dumps(report(probe.gpu_of(0, power_w=float("nan"))))
    assert "NaN" in text
    with pytest.raises(ReportError, match="power_w"):
        read_report(text)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, b"\xff\xfe", "x" * 9_000_000])
def test_a_text_that_is_no_report_is_refused_in_one_line(text: str | bytes) -> None:
    with pytest.raises(ReportError, match=r"^report: ") as caught:
        read_report(text)
    assert "\n" not in str(caught.value)


def test_what_the_probe_writes_of_a_text_is_never_refused() -> None:
    """Any user may name a process as they like, and must not make their server unknown by it."""
    refused = re.compile(f"[{UNPRINTABLE}\ud800-\udfff]")
    shown = probe.printable("".join(map(chr, range(0x110000))))
    assert len(shown) == 0x110000
    assert refused.findall(shown) == []
    assert probe.printable("naïve 訓練.py") == "naïve 訓練.py"


def test_the_largest_server_is_accepted() -> None:
    assert len(check_report(report(*(probe.gpu_of(i) for i in range(MAX_GPUS_OF_SERVER)))).gpus) == 1024
