"""Replacement of a server's GPUs in an inventory file."""

from __future__ import annotations

from pathlib import Path

import pytest

from resource_manager import GPUResourceManager, Settings
from resource_manager.core.models import Gpu
from resource_manager.errors import InventoryError
from resource_manager.manager.inventory_edit import gpus_replaced
from resource_manager.manager.inventory_file import load_inventory

TEXT = """# our servers
[[servers]]
name = "gpu-a"  # the old one
address = "ada@gpu-a"
cpus = 64
# GPU 2 is left out: it does not answer

[[servers.gpus]]
ids = [0, 1]
type = "A100"
uuids = [
  "GPU-0",
  "GPU-1",
]

[servers.labels]
rack = "7"

[[servers]]
name = "gpu-b"
gpus = 4
gpu_type = "L4"
cpus = 8

[[servers]]
name = "many-{id}"
count = 2
gpus = 1
cpus = 8
"""
NEW = [
    Gpu(0, "A100", memory_mib=81920, uuid="GPU-x"),
    Gpu(1, 'A"100:1g', memory_mib=9728, uuid="MIG-2"),
    Gpu(2, "910B", "ascend"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "servers.toml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("server", ["gpu-a", "gpu-b"])
def test_only_the_servers_gpus_change(path: Path, server: str) -> None:
    before = {node.name: node for node in load_inventory(path)}
    with gpus_replaced(path, server, NEW):
        assert path.read_text() == TEXT
    after = {node.name: node for node in load_inventory(path)}
    assert after.pop(server).gpus == tuple(NEW)
    before.pop(server)
    assert after == before
    text = path.read_text()
    assert text.startswith('# our servers\n[[servers]]\nname = "gpu-a"  # the old one\n')
    assert ("is left out" in text) is (server == "gpu-b")
    assert '[servers.labels]\nrack = "7"\n' in text
    with gpus_replaced(path, server, []):
        pass
    assert {node.name: len(node.gpus) for node in load_inventory(path)}[server] == 0


def test_nothing_is_written_if_the_block_fails(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), gpus_replaced(path, "gpu-a", NEW):
        raise ZeroDivisionError
    assert path.read_text() == TEXT
    assert list(path.parent.iterdir()) == [path]


def test_a_server_without_a_table_of_its_own_and_a_missing_file_are_refused(path: Path) -> None:
    by_hand = "'many-2' is not described by a table of its own: put its GPUs there by hand"
    with pytest.raises(InventoryError, match=by_hand), gpus_replaced(path, "many-2", NEW):
        raise AssertionError("the block is not entered")
    inline = 'name = "gpu-c"\ngpus = [\n  {count = 2, type = "L4"},\n]\ncpus = 1\n'
    path.write_text(f"[[servers]]\n{inline}")
    with pytest.raises(InventoryError, match="by hand"), gpus_replaced(path, "gpu-c", NEW):
        raise AssertionError("the block is not entered")
    missing = path.with_name("none.toml")
    with pytest.raises(InventoryError, match="No such file"), gpus_replaced(missing, "gpu-a", NEW):
        raise AssertionError("the block is not entered")


def test_what_was_adopted_survives_the_next_start_with_the_file(path: Path) -> None:
    settings = Settings(store="memory://", inventory=path)
    with GPUResourceManager(settings) as manager:
        manager.adopt("gpu-a", NEW)
        assert [gpu["uuid"] for gpu in manager.server("gpu-a")["gpus"]] == ["GPU-x", "MIG-2", ""]
        again = GPUResourceManager(settings, store=manager.store)
        assert again.server("gpu-a") == manager.server("gpu-a")
