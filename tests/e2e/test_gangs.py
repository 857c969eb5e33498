"""Gangs over four servers, network namespaces with an sshd each: torchrun, mpirun, and every fault."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.bench import TTL_S, Bench, wait_for
from tests.e2e.gang_servers import INTERFACE, GangServers
from tests.e2e.servers import SSHD
from tests.faults import namespaces

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TORCH = "torch==2.13.0"

SERVER = """
[[servers]]
name = "{name}"
gpus = 2
gpu_type = "gang"
cpus = 8
address = "{address}"
interface = "{interface}"
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs sshd (Debian: openssh-server) and root")
    if namespaces.what_is_missing():
        pytest.skip(namespaces.what_is_missing())
    servers = GangServers(tmp_path_factory.mktemp("gang"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def airflow(tmp_path_factory, servers):
    ssh = f"-i {servers.key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    inventory = "".join(
        SERVER.format(name=server.name, address=server.address, interface=INTERFACE)
        for server in servers.servers
    )
    settings = {
        "AIRFLOW_CONN_GANG_SSH": servers.connection,
        "MPI_SSH": ssh,
        "TORCHRUN": str(Path(os.environ.get("TEST_TORCH_VENV", "/nowhere")) / "bin" / "torchrun"),
    }
    with Bench(tmp_path_factory.mktemp("airflow"), servers=inventory, **settings) as bench:
        bench.free_within_s = 120.0
        bench.switch_the_reconciler_on()
        yield bench


def members(run):
    """Return (rank, server, fencing token) of every process of the run so far."""
    return sorted({(beat["member"], beat["server"], beat["process"].split("-")[0]) for beat in run.beats()})


def beating(run, since_s=1.5):
    """Return rank and server of the members that wrote into the ledger of late."""
    now = time.time()
    return {(beat["member"], beat["server"]) for beat in run.beats() if now - beat["at"] < since_s}


def wait_until_all_train(run, count=4):
    wait_for(lambda: len(members(run)) >= count, 120, f"the start of {count} members")
    run.wait_until_deferred()


def processes_on(server):
    """Return the job's processes on a server."""
    pids = subprocess.run(["ip", "netns", "pids", server.namespace], capture_output=True, text=True)
    found = []
    for pid in map(int, pids.stdout.split()):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process = psutil.Process(pid)
            if any(word.endswith("beat.py") for word in process.cmdline()):
                found.append(process)
    return found


def torchrun():
    """Return the torchrun of the environment for these tests, made at its first use, or None."""
    folder = os.environ.get("TEST_TORCH_VENV")
    return None if folder is None else Path(folder) / "bin" / "torchrun"


def test_torchrun_runs_over_the_gang_without_a_flag(bench):
    if torchrun() is None or not torchrun().exists():
        pytest.skip(f"needs {TORCH} in the virtual environment that TEST_TORCH_VENV names")
    run = bench.run("gang_torch")
    run.wait_until("success", 300)
    result = bench.api.xcom("gang_torch", run.run_id, "job")
    assert (result["world"], result["sum"], result["node_rank"]) == (8, 36, "0")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_runs_over_the_gang_by_its_hostfile(bench, servers):
    run = bench.run("gang_mpi")
    run.wait_until("success", 300)
    log = run.log()
    for rank in range(8):
        assert f"{rank} of 8 on {servers.servers[rank // 2].name}" in log


def test_a_rank_is_killed(bench, servers):
    run = bench.run("gang_job")
    wait_until_all_train(run)
    [job] = processes_on(servers.servers[2])
    job.kill()
    wait_for(lambda: len(members(run)) == 8, 200, "a second gang")
    run.finish()
    run.wait_until("success")
    assert "rank 2 on gang-2 ended with exit code 137" in run.log(1)
    first, second = {token for _, _, token in members(run)}
    places = [[each[:2] for each in members(run) if each[2] == token] for token in (first, second)]
    assert places[0] == places[1] == [(str(rank), f"gang-{rank}") for rank in range(4)]


def test_a_server_is_cut_off(bench, servers):
    """Its member keeps its GPUs until the reconciler reaches it; the next gang runs without them."""
    run = bench.run("gang_job", nodes=3)
    wait_until_all_train(run, 3)
    servers.servers[2].cut()
    try:
        wait_for(lambda: beating(run) >= {("2", "gang-3")}, 300, "a gang without the server")
        assert ("2", "gang-2") in beating(run), "its member goes on, and holds what it uses"
        held = [lease for lease in bench.manager.leases() if lease["state"] == "ERROR"]
        assert [[member["server_name"] for member in lease["members"]] for lease in held] == [["gang-2"]]
    finally:
        servers.servers[2].join()
    wait_for(lambda: ("2", "gang-2") not in beating(run), 120, "the end of the member that was cut off")
    wait_for(lambda: len(bench.manager.leases()) == 1, 120, "the release of its GPUs")
    assert beating(run) == {("0", "gang-0"), ("1", "gang-1"), ("2", "gang-3")}
    run.finish()
    run.wait_until("success")


def test_the_triggerer_is_killed(bench):
    run = bench.run("gang_job")
    wait_until_all_train(run)
    before = members(run)
    bench.kill("triggerer")
    time.sleep(TTL_S + 2)  # without renewals the lease expires, and its GPUs stay allocated
    bench.start("triggerer")
    run.finish()
    run.wait_until("success", 200)
    assert members(run) == before


def test_the_triggerer_is_killed_between_two_starts(bench):
    run = bench.run("lingering_gang")
    wait_for(Path(f"{bench.ledger}-starting").exists, 180, "the middle of the start")
    wait_for(lambda: {each[0] for each in members(run)} >= {"0", "1"}, what="the first two members")
    bench.kill("triggerer")
    bench.start("triggerer")
    wait_until_all_train(run)
    assert len({token for _, _, token in members(run)}) == 1
    run.finish()
    run.wait_until("success", 300)
    assert [rank for rank, _, _ in members(run)] == ["0", "1", "2", "3"]
    assert len(run.processes()) == 4


@pytest.mark.parametrize("away_s", [5.0, 2 * TTL_S])
def test_redis_is_restarted(bench, away_s):
    """Both gangs are deferred meanwhile: one trains, and one waits for it."""
    run = bench.run("gang_job")
    wait_until_all_train(run)
    waits = bench.run("gang_job")
    waits.wait_until_waiting()
    redis = next(process for process in bench.processes() if "redis" in process.name())
    redis.send_signal(signal.SIGKILL)
    time.sleep(away_s)
    bench.start_redis()
    time.sleep(TTL_S)
    run.finish()
    run.wait_until("success", 200)
    wait_until_all_train(waits)
    waits.finish()
    waits.wait_until("success", 200)
    for each in run, waits:
        assert len(members(each)) == 4, "no member began twice"


def test_the_task_is_cleared_while_it_trains(bench):
    run = bench.run("gang_job")
    wait_until_all_train(run)
    run.clear()
    run.wait_until_deferred(try_number=2)
    # The first try's trigger goes on until Airflow cancels it, and would end the job in its place.
    wait_for(lambda: "started by an earlier execution; watching it" in run.log(), what="the second one")
    run.finish()
    run.wait_until("success")
    assert len(members(run)) == 4


def test_the_task_is_marked_failed_while_it_trains(bench, servers):
    run = bench.run("gang_job")
    wait_until_all_train(run)
    run.mark("failed")
    wait_for(
        lambda: not any(processes_on(server) for server in servers.servers), TTL_S + 30, "the end of all"
    )
    run.wait_until("failed")


def test_a_server_is_drained_while_a_gang_waits(bench):
    trains = bench.run("gang_job", nodes=2)
    wait_until_all_train(trains, 2)
    waits = bench.run("gang_job", nodes=4)
    waits.wait_until_waiting()
    bench.manager.drain("gang-3", reason="new fan")
    try:
        trains.finish()
        trains.wait_until("success")
        wait_for(lambda: "gang-3" in bench.manager.queue()[0]["reason"], what="the reason")
        assert not waits.beats()
    finally:
        bench.manager.resume("gang-3")
    wait_until_all_train(waits)
    waits.finish()
    waits.wait_until("success")


def main():
    """Make the virtual environment for the test with torch: `python -m tests.e2e.test_gangs FOLDER`."""
    folder = sys.argv[1]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([f"{folder}/bin/pip", "install", "-q", TORCH, "numpy"], check=True)


if __name__ == "__main__":
    main()
