"""Inventory files: their contents, and one line with file, line and reason for a wrong one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu
from resource_manager.errors import ClusterFileError
from resource_manager.manager.cluster_file.reading import load_inventory
from resource_manager.manager.cluster_file.servers import Server, default_inventory, nodes_of
from resource_manager.manager.cluster_file.writing import sections_of

GOOD = """
[[servers]]
name = "a100-box"
address = "10.0.0.7"
cpus = 96
memory_mib = 1048576
gpus = 4
gpu_type = "A100"
gpu_memory_mib = 81920

[[servers]]
name = "mixed"
id = 7
cpus = 64
resources = { bandwidth_gbps = 12.5 }
gpus = [ { count = 2, type = "H100" }, { ids = [4, 6], type = "910B", vendor = "ascend" } ]
labels = { rack = "r2" }

[[servers]]
name = "plain-{id}"
address = "10.0.1.{id}"
count = 2
cpus = 16
"""


def test_a_file_describes_its_servers(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(GOOD)
    first, mixed, *plain = load_inventory(path)
    assert (first.name, first.server_id, first.address) == ("a100-box", 0, "10.0.0.7")
    assert first.resources == {"cpus": 96, "memory_mib": 1048576}
    assert first.gpus == tuple(Gpu(i, "A100", "nvidia", 81920) for i in range(4))
    assert (mixed.server_id, mixed.resources["bandwidth_gbps"], mixed.labels) == (7, 12.5, {"rack": "r2"})
    assert [(gpu.gpu_id, gpu.gpu_type, gpu.vendor) for gpu in mixed.gpus] == [
        (0, "H100", "nvidia"),
        (1, "H100", "nvidia"),
        (4, "910B", "ascend"),
        (6, "910B", "ascend"),
    ]
    assert [(node.name, node.server_id, node.address, node.gpus) for node in plain] == [
        ("plain-8", 8, "10.0.1.8", ()),
        ("plain-9", 9, "10.0.1.9", ()),
    ]


def test_a_file_pins_gpus_by_uuid_and_says_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text("""
[[servers]]
name = "a"
cpus = 1

[[servers.gpus]]
ids = [3, 1]
type = "H100"
uuids = ["GPU-3", "GPU-1"]
pci = ["0000:3f:00.0", "0000:1f:00.0"]
numa_node = 0
nvlink_group = 0

[[servers.gpus]]
ids = [7]
""")
    [node] = load_inventory(path)
    assert [(gpu.gpu_id, gpu.uuid) for gpu in node.gpus] == [(3, "GPU-3"), (1, "GPU-1"), (7, "")]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[[servers]\n", 1, "TOML|Expected|expected"),
        ("", 1, "servers"),
        ("[[servers]]\nname = 'a'\n", 1, "cpus"),
        ("[[servers]]\nname = 'a'\ncpus = 1\n\n[[servers]]\nname = 'b'\ncpus = -4\n", 7, "cpus"),
        ("[[servers]]\nname = 'a'\ncpus = 1\ngpu = 8\n", 4, "gpu"),
        (
            "[[servers]]\nname = 'a b'\ncpus = 1\n",
            2,
            "name: may have only the characters A-Za-z.*, got 'a b'",
        ),
        ("[[servers]]\nname = 'a{0..3}'\ncpus = 1\n", 1, "{id} and no other brace, got 'a{0..3}'"),
        ("[[servers]]\nname = 'a'\ncpus = 1\ngpus = 'eight'\n", 4, "gpus"),
        ("[[servers]]\nname = 'a'\ncpus = 1\n\n[[servers]]\nname = 'a'\ncpus = 1\n", 5, "used twice"),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\nid = 3\n[[servers]]\nname = 'b'\ncpus = 1\nid = 3\n",
            5,
            "used twice",
        ),
        ("[[servers]]\nname = 'a'\ncount = 2\ncpus = 1\n", 1, "{id}"),
        ("[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ ids = [1, 1] }]\n", 1, "GPU id"),
        ("[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ type = 'A' }]\n", 4, "count or ids"),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ count = 2, uuids = ['GPU-1'] }]\n",
            4,
            "uuids has 1 value for 2 GPUs",
        ),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ count = 2, uuids = ['GPU-1', 'GPU-1'] }]\n",
            1,
            "UUID of 'a' is used twice",
        ),
        (
            "[[servers]]\nname = 'n{id}'\ncount = 2\ncpus = 1\ngpus = [{ count = 1, uuids = ['GPU-1'] }]\n",
            1,
            "UUID of 'n1' is used twice",
        ),
        ("[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ count = 1, uuids = ['a b'] }]\n", 4, "uuids"),
        ("[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ count = 1, pci = ['7'] }]\n", 4, "of the form .*'7'"),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\nvendor = 'matrox'\n",
            4,
            "'nvidia', 'amd' or 'ascend'",
        ),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\ngpus = [{ count = 1, vendor = 'NVIDIA' }]\n",
            4,
            "vendor: .*amd",
        ),
        ("[[servers]]\nname = 'a'\ncpus = 1\nresources = { cpus = 9 }\n", 1, "keys of their own"),
        *(
            (f"[[servers]]\nname = 'a'\n{text}\n", 3, "must be less than or equal to 9007199254740992, got")
            for text in (
                f"cpus = {'9' * 400}",
                f"memory_mib = {2**60}\ncpus = 1",
                f"resources = {{ net = {2**60} }}\ncpus = 1",
            )
        ),
        ("[[servers]]\nname = 'a'\ncpus = 1\nresources = { gpus = 9 }\n", 1, "remove them from resources"),
        ("[[servers]]\nname = 'a'\ncpus = 1\nresources = { gpu_milli = 3 }\n", 1, "key of their own: gpus;"),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\nmemory_mib = 1\nresources = { memory_mib = 9 }\n",
            1,
            "keys of their own",
        ),
        ("[[machines]]\nname = 'a'\n", 1, "servers|machines"),
        *(  # in the lines of a diff they would hide others from who reviews them
            (f"[[servers]]\nname = 'a'\ncpus = 1\n{text}\n", 4, "control or an invisible character|pattern")
            for text in (
                'gpu_type = "A\\u001b[2J"',
                'address = "a\\nb"',
                'labels = { a = "\\u202e" }',
                'labels = { "a\\nb" = "" }',
                'resources = { "a\\u001b" = 1 }',
                'gpus = [{ count = 1, type = "A\\u001b" }]',
            )
        ),
        (
            "[[servers]]\nname = 'a'\ncpus = 1\nconfine = 'yes'\n",
            4,
            "servers.0.confine: .*'off', 'try' or 'must'",
        ),
        ("[[servers]]\nname = 'a'\ncpus = 1\nwritable = '/data'\n", 4, "servers.0.writable: .*list"),
        *(
            (
                f"[[servers]]\nname = 'a'\ncpus = 1\nwritable = ['/data', {path!r}]\n",
                4,
                "servers.0.writable.1: must be an absolute path, or one that begins with ~/, and no system's",
            )
            for path in ("data", "", "/", "//", "/dev", "/proc/", "/sys", "/run", "~root/x", "~x")
        ),
    ],
)
def test_a_wrong_file_is_refused_with_file_line_and_reason(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(text)
    with pytest.raises(ClusterFileError, match=reason) as caught:
        load_inventory(path)
    message = str(caught.value)
    assert re.match(rf"{re.escape(str(path))}:{line}:\d+: ", message)
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="No such file"):
        load_inventory(tmp_path / "missing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterFileError, match="UTF-8"):
        load_inventory(binary)


def test_a_manager_takes_a_file_and_a_default(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(GOOD)
    with GPUResourceManager.from_url("memory://", inventory=path) as manager:
        result = manager.allocate_resources("t", 2, 8, gpu_types=["910B"])
        assert result is not None
        assert (result["server_name"], result["gpu_devices"], result["vendor"]) == ("mixed", "4,6", "ascend")
        with pytest.raises(ValueError, match="96"):
            manager.allocate_resources("u", 2, 97)
    assert [node.name for node in default_inventory()] == [f"gpu-server-{i}" for i in range(4)]


def test_islands_are_stated_or_those_of_nvlink_or_numa_and_written_back() -> None:
    groups = [{"ids": [0, 1], "nvlink_group": 0}, {"ids": [2, 3], "nvlink_group": 1}]
    numa = [{"ids": [2, 3], "numa_node": 1}, {"ids": [0, 1], "numa_node": 0}]
    for value, wanted in (
        ({"gpus": 4, "islands": [[0, 3], [1, 2]]}, ((0, 3), (1, 2))),
        ({"gpus": groups}, ((0, 1), (2, 3))),
        ({"gpus": numa}, ((2, 3), (0, 1))),
        ({"gpus": groups[:1]}, ()),
        ({"gpus": 4}, ()),
    ):
        [node] = nodes_of([Server.model_validate({"name": "a", "cpus": 2, **value})])
        assert node.islands == wanted
        [again] = nodes_of(
            [Server.model_validate(each) for each in sections_of(ClusterState([node]))["servers"]]
        )
        assert again == node


@pytest.mark.parametrize("islands", [[[0, 1], [1]], [[0, 9]]])
def test_an_island_of_unknown_or_repeated_gpus_is_refused(islands: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="islands must name GPUs of the server, each once"):
        Server.model_validate({"name": "a", "cpus": 2, "gpus": 4, "islands": islands})
