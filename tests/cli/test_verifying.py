"""`verify` and `adopt` on a service and a store, for this machine with the stand-in of NVIDIA's library."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import GpuClosed
from resource_manager.core.models import Gpu, Node
from tests.builders import granted_lease
from tests.cli.targets import Run, running_on
from tests.nvml.standin import State, gpu, library, mig, state, uuid_of

__all__ = ["library", "state"]

HERE = socket.gethostname()
A100 = "A100-SXM4-80GB"


def node(*gpus: Gpu, name: str = HERE, number: int = 0, address: str = "") -> Node:
    return Node(name, number, {"cpus": 8}, gpus, address)


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    nodes = [
        node(Gpu(0, A100, memory_mib=81920, uuid=uuid_of(0)), Gpu(1, uuid=uuid_of(1))),
        node(Gpu(0, uuid="GPU-other"), name="other", number=1),
    ]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        yield manager


def test_a_server_as_in_the_inventory(run: Run, state: State) -> None:
    done = run("verify", HERE)
    assert (done.exit_code, done.stdout) == (0, f"{HERE}: same: as in the inventory\n")
    assert json.loads(run("verify", "0", "--json").stdout) == [
        {
            "server": HERE,
            "verdict": "same",
            "missing": {},
            "unknown": {},
            "renumbered": {},
            "changed": [],
            "text": "as in the inventory",
        }
    ]


def test_a_lost_gpu_and_a_new_one_are_named_and_then_adopted(
    run: Run, state: State, manager: GPUResourceManager
) -> None:
    state.write(gpu(1), gpu(7))
    done = run("verify", HERE)
    assert (done.exit_code, done.stdout) == (
        1,
        f"{HERE}: different: missing: {uuid_of(0)} (GPU 0); not in the inventory: {uuid_of(7)} (GPU 1); "
        "GPU 1 is now 0\n",
    )
    lease = granted_lease(manager.submit("t", 1, server=HERE))
    refused = run("adopt", HERE)
    assert (refused.exit_code, refused.stderr) == (
        1,
        f"Error: server {HERE!r} has 1 lease (t vnpm): drain it, and repeat this once they have ended\n",
    )
    manager.release("t", fencing_token=lease["fencing_token"])
    adopted = run("adopt", HERE)
    assert (adopted.exit_code, adopted.stdout) == (0, f"{HERE}: 2 GPUs adopted\n")
    assert run("verify", HERE).exit_code == 0
    assert [found["uuid"] for found in manager.server(HERE)["gpus"]] == [uuid_of(1), uuid_of(7)]
    assert granted_lease(manager.submit("u", 2, server=HERE))["gpu_uuids"] == [uuid_of(1), uuid_of(7)]
    assert manager.server("other")["gpus"][0]["uuid"] == "GPU-other"


def test_a_server_without_uuids_is_pinned_by_adopting(state: State, tmp_path: Path) -> None:
    state.write(gpu(0, "mig_mode 1"), mig(0, "1g.10gb", 10), mig(1, "1g.10gb", 10), gpu(1))
    manager = GPUResourceManager.from_url("memory://", inventory=[node(Gpu(0), Gpu(1), Gpu(2))])
    with manager, running_on("store", manager, tmp_path) as run:
        unpinned = run("verify")
        assert (unpinned.exit_code, unpinned.stdout.split(":")[1]) == (1, " not pinned")
        answer = json.loads(run("adopt", "0", "--json").stdout)
        assert [(found["uuid"], found["type"]) for found in answer["gpus"]] == [
            (uuid_of(0, "MIG"), f"{A100}:1g.10gb"),
            (uuid_of(1, "MIG"), f"{A100}:1g.10gb"),
            (uuid_of(1), A100),
        ]
        assert run("verify").exit_code == 0


def test_servers_that_give_no_report_are_a_line_each_and_exit_3(
    run: Run, state: State, manager: GPUResourceManager
) -> None:
    done = run("verify")
    assert (done.exit_code, done.stdout) == (3, f"{HERE}: same: as in the inventory\n")
    without = "server other has no address in the inventory, so it cannot be asked"
    assert done.stderr == f"Error: {without}\n"
    assert (run("adopt", "other").exit_code, run("adopt", "other").stderr) == (3, f"Error: {without}\n")
    state.write(gpu(0), machine=["fail nvmlInit_v2 18"])
    broken = run("adopt", HERE)
    assert (broken.exit_code, len(broken.stderr.splitlines())) == (3, 1)
    assert "Driver/library version mismatch" in broken.stderr
    assert [found["uuid"] for found in manager.server(HERE)["gpus"]] == [uuid_of(0), uuid_of(1)]


@pytest.mark.parametrize("command", ["verify", "adopt"])
def test_an_unknown_server_is_one_line_and_bad_input(run: Run, command: str) -> None:
    done = run(command, "nope")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "'nope' is not in the inventory of 2 servers" in done.stderr


def test_one_gpu_is_drained_by_number_or_uuid(run: Run, manager: GPUResourceManager) -> None:
    done = run("drain", HERE, "--gpu", uuid_of(0), "--reason", "fans")
    assert (done.exit_code, done.stdout) == (0, f"{HERE}: GPU {uuid_of(0)} drained\n")
    assert [each["reason"] for each in manager.server(HERE)["gpus_closed"]] == ["drained; fans"]
    wrong = run("drain", HERE, "--gpu", "0", "--failed")
    assert (wrong.exit_code, wrong.stdout, len(wrong.stderr.splitlines())) == (2, "", 1)
    assert "--failed is said of a whole server" in wrong.stderr


def test_a_closed_gpu_is_opened_by_number_or_uuid(run: Run, manager: GPUResourceManager) -> None:
    manager.commit(
        lambda cluster, now: [
            GpuClosed(HERE, 0, uuid_of(0), "xid 79", now),
            GpuClosed(HERE, 1, "", "heat", now),
        ]
    )
    assert [each["reason"] for each in manager.server(HERE)["gpus_closed"]] == ["xid 79", "heat"]
    first = run("resume", HERE, "--gpu", uuid_of(0))
    assert (first.exit_code, first.stdout) == (
        0,
        f"{HERE}: GPU {uuid_of(0)} takes leases again; still closed: GPU 1, which --gpu 1 opens\n",
    )
    second = run("resume", "0", "--gpu", "1", "--json")
    assert json.loads(second.stdout)["gpus_closed"] == []
    for server, number, exit_code, line in (
        (HERE, "7", 2, f"{HERE} has no GPU '7'"),
        (HERE, "GPU-no", 2, f"{HERE} has no GPU 'GPU-no'"),
        ("nope", "0", 2, "not in the inventory"),
    ):
        wrong = run("resume", server, "--gpu", number)
        assert (wrong.exit_code, wrong.stdout, len(wrong.stderr.splitlines())) == (exit_code, "", 1)
        assert line in wrong.stderr
