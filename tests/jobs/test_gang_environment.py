"""Environment of the members of a gang."""

import pytest

from resource_manager.jobs.gang_environment import gang_environment, host_of, hostfile
from resource_manager.jobs.launchers import job_key
from tests.jobs.gangs import gang_allocation


def test_a_member_gets_what_torchrun_and_mpi_need():
    allocation = gang_allocation(nodes=2, gpus=4)
    assert gang_environment(allocation, 1) == {
        "GPU_NODE_RANK": "1",
        "GPU_NODES_NUM": "2",
        "GPU_NODES_IPS": "127.0.0.1\n127.0.0.2",
        "GPU_MASTER_ADDR": "127.0.0.1",
        "GPU_MASTER_PORT": "29500",
        "GPU_GPUS_PER_NODE": "4",
        "GPU_GPUS_NUM": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29500",
        "PET_RDZV_ID": job_key("d/r/gang", 1),
    }
    assert hostfile(allocation) == "127.0.0.1 slots=4\n127.0.0.2 slots=4\n"


def test_a_gang_without_gpus_has_one_process_a_member():
    allocation = gang_allocation(nodes=2, gpus=0)
    environment = gang_environment(allocation, 0)
    assert (environment["GPU_GPUS_NUM"], environment["PET_NPROC_PER_NODE"]) == ("0", "1")
    assert hostfile(allocation) == "127.0.0.1 slots=1\n127.0.0.2 slots=1\n"


def test_members_on_one_server_share_its_line_in_the_hostfile():
    allocation = gang_allocation(nodes=3, gpus=2)
    for member in allocation["members"][1:]:
        member["address"] = "box"
    assert hostfile(allocation) == "127.0.0.1 slots=2\nbox slots=4\n"


def test_the_lease_of_one_server_gets_none_of_it():
    assert gang_environment(gang_allocation(nodes=1), 0) == {}


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("root@10.0.0.7:2222", "10.0.0.7"),
        ("gpu-1.example:22", "gpu-1.example"),
        ("tcp://10.0.0.7:2375", "10.0.0.7"),
        ("ssh://me@box", "box"),
        ("[fd00::7]:22", "fd00::7"),
        ("", ""),
        ("unix:///var/run/docker.sock", ""),
    ],
)
def test_members_meet_at_the_host_of_the_inventorys_address(address, host):
    assert host_of(address) == host
