"""Comparison with other schedulers on the same work: `python benchmarks/peers.py [PEER …]`.

Work: grant 2 GPUs and 16 CPUs of 4 servers x 8 GPUs x 64 CPUs, 16 places, and release them; no process is
started. Peers: a bare redis-py lock, Ray placement groups (`make` installs Ray in a separate environment),
and a separate Slurm with the same fake inventory through its C API (as root, if Debian's slurm-wlm,
libslurm-dev and gcc are installed). One after the other, so that the daemons of one do not slow down another.

- `one`: one client.
- `full`: 32 clients in a closed loop on the 16 places, so that half of them wait for a place.
- `held_50`, `held_100`: so many clients that hold the only place for 5 ms; not of Slurm and Ray.

Each figure is the median of five measurements. A wait that had not ended with the measurement counts with the
time that it had taken. Settings: Slurm without and with an epilog (`/bin/true`), after which it looks for
freed resources; Ray as it comes, when it does so ten times a second, and tuned; the lock with redis-py's
defaults, which look for it every 0.1 s. Slurm's clients are processes, Ray's are threads of one driver, those
of Redis are in up to ten processes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis

from demo.stack import free_ports
from resource_manager.cli.bench.store import LOCK_NAME, open_manager, redis_server
from resource_manager.manager.manager import GPUResourceManager

GPUS, CPUS = 2, 16
PLACES = 16
MEASUREMENTS = 5
SECONDS = {"one": 2.0, "full": 4.0, "held": 6.0}
PROCESSES = 10
HOLD_S = 0.005

Pair = Callable[[float], bool]
"""Take a place, waiting for it at most so many seconds, and give it back; return whether it was got."""

Clients = Callable[[int], Sequence[Pair]]
"""Return so many clients."""


class MissingPeer(Exception):
    """A peer that is not installed or does not start, with the reason."""


# ---- clients ----


def closed_loop(pairs: Sequence[Pair], seconds: float) -> list[list[float]]:
    """Run each pair in a thread, again and again; return the seconds that each took.

    One that was not over in time is negative, since not every peer can give up a wait.
    """
    taken: list[list[float]] = [[] for _ in pairs]
    ends = time.perf_counter() + seconds

    def loop(pair: Pair, mine: list[float]) -> None:
        while (left := ends - (begin := time.perf_counter())) > 0:
            got = pair(left)
            spent = time.perf_counter() - begin
            mine.append(spent if got and spent <= left else -spent)

    with ThreadPoolExecutor(len(pairs)) as threads:
        list(threads.map(loop, pairs, taken))
    return taken


def figures_of(taken: Sequence[Sequence[float]], seconds: float) -> dict[str, float]:
    waits = sorted(abs(spent) for mine in taken for spent in mine)
    return {
        "pairs_per_s": sum(spent > 0 for mine in taken for spent in mine) / seconds,
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[int(len(waits) * 0.99)],
        "max_s": waits[-1],
        "never_got_it": sum(not any(spent > 0 for spent in mine) for mine in taken),
    }


def medians(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure of `MEASUREMENTS` measurements."""
    found = [measure() for _ in range(MEASUREMENTS)]
    return {name: round(statistics.median(each[name] for each in found), 4) for name in found[0]}


def in_threads(pairs: Sequence[Pair], seconds: float) -> dict[str, float]:
    """Measure clients of this process."""
    pairs[0](60.0)
    return medians(lambda: figures_of(closed_loop(pairs, seconds), seconds))


def in_processes(kind: str, case: str, clients: int) -> dict[str, float]:
    """Measure clients of Redis, in up to `PROCESSES` processes."""
    seconds = SECONDS[case]
    processes = min(PROCESSES, clients)
    with redis_server(None) as url, ExitStack() as running:
        open_manager(url, 4).reset_resources()
        children = []
        for number in range(processes):
            own = str(len(range(number, clients, processes)))
            child = subprocess.Popen(
                [sys.executable, __file__, "child", kind, case, url, str(number), own],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.append(running.enter_context(child))
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()

        def measure() -> dict[str, float]:
            for child in children:
                assert child.stdin is not None
                child.stdin.write(f"{seconds}\n")
                child.stdin.flush()
            return figures_of(
                [mine for child in children for mine in json.loads(child.stdout.readline())],  # type: ignore[union-attr]
                seconds,
            )

        measure()  # imports, connections and the first snapshot are not to be measured
        return medians(measure)


def child(kind: str, case: str, url: str, number: int, clients: int) -> None:
    """Measure so many clients for as many seconds as each line of the input says."""
    make = {"this": this_pair, "redis_lock": redis_lock_pair}[kind]
    manager = open_manager(url, 4) if kind == "this" else None
    pairs = [make(url, manager, case, f"{number}-{i}") for i in range(clients)]
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(closed_loop(pairs, float(line))), flush=True)


# ---- this manager and the lock ----


def this_pair(url: str, manager: GPUResourceManager | None, case: str, name: str) -> Pair:
    """Return a client of this manager; the place that is held is the only one of 32 GPUs."""
    assert manager is not None
    asked: dict[str, Any] = {"gpus": GPUS, "cpus": CPUS}
    if case == "held":
        asked = {"gpus": 8, "cpus": 64, "server": 0}

    def pair(timeout_s: float) -> bool:
        if case == "one":
            return manager.allocate(name, **asked) is not None and manager.release_resources(name)
        got = manager.submit(name, **asked)["state"] == "RUNNING"
        if not got:
            found = manager.wait(name, timeout_s)
            got = found is not None and found["state"] == "RUNNING"
        if got and case == "held":
            time.sleep(HOLD_S)
        if got or not manager.cancel(name):  # else granted a moment ago
            manager.release_resources(name)
        return got

    return pair


def redis_lock_pair(url: str, manager: GPUResourceManager | None, case: str, name: str) -> Pair:
    """Return a client of one redis-py lock, with a connection of its own."""
    lock = redis.Redis.from_url(url).lock(LOCK_NAME, timeout=60)

    def pair(timeout_s: float) -> bool:
        if not lock.acquire(blocking_timeout=timeout_s):
            return False
        if case == "held":
            time.sleep(HOLD_S)
        lock.release()
        return True

    return pair


# ---- Ray ----

TUNED = {
    "RAY_raylet_report_resources_period_milliseconds": "1",
    "RAY_gcs_create_placement_group_retry_min_interval_ms": "1",
    "RAY_gcs_create_placement_group_retry_max_interval_ms": "10",
}
"""How soon a server reports freed resources, and how soon a waiting group is tried again."""


@contextmanager
def ray_pairs() -> Iterator[Clients]:
    """Run Ray on four fake servers; yield what returns so many clients."""
    try:
        import ray
        from ray.cluster_utils import Cluster
        from ray.util.placement_group import placement_group, remove_placement_group
    except ModuleNotFoundError:
        raise MissingPeer("not installed: pip install ray") from None
    # Otherwise Ray would start a process for each of the declared CPUs, which do not exist.
    os.environ.update(RAY_enable_worker_prestart="0", RAY_prestart_worker_first_driver="0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    server: dict[str, Any] = {"num_cpus": 64, "num_gpus": 8, "object_store_memory": 100 * 2**20}
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**server, "include_dashboard": False})
        for _ in range(3):
            cluster.add_node(**server)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has no specific exception for this
        raise MissingPeer(f"did not start: {str(error).partition('.')[0]}") from error

    def pair(timeout_s: float) -> bool:
        group = placement_group([{"GPU": GPUS, "CPU": CPUS}], strategy="STRICT_PACK")
        got: bool = group.wait(math.ceil(timeout_s))  # it waits whole seconds
        remove_placement_group(group)
        return got

    try:
        yield lambda clients: [pair] * clients
    finally:
        ray.shutdown()
        cluster.shutdown()


# ---- Slurm ----


SLURM = """ClusterName=fake
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=n[0-3] Default=YES MaxTime=INFINITE State=UP
{epilog}
"""
NODE = (
    "NodeName=n{n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=1000 Gres=gpu:8"
)


@contextmanager
def slurm_pairs(epilog: str) -> Iterator[Clients]:
    """Run a Slurm with the same inventory; yield what returns so many clients, each a process.

    `epilog` is the program that Slurm runs on the server after each job; "" for none.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd", "cc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        packages = "Debian: slurm-wlm, libslurm-dev, gcc"
        raise MissingPeer(f"not installed: {', '.join(missing)} ({packages})" if missing else "needs root")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        client = [f"{folder}/slurm_pairs", str(Path(__file__).with_name("slurm_pairs.c")), "-lslurm"]
        if subprocess.run(["cc", "-O2", "-o", *client], capture_output=True, check=False).returncode:
            raise MissingPeer("slurm_pairs.c cannot be built: install libslurm-dev")
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        folder.chmod(0o755)  # munged requires a socket that every user can reach
        ports = free_ports(5)
        nodes = "\n".join(NODE.format(n=n, port=port) for n, port in enumerate(ports[1:]))
        hook = f"Epilog={epilog}" if epilog else ""
        configuration = SLURM.format(folder=folder, ports=ports, nodes=nodes, epilog=hook)
        (folder / "slurm.conf").write_text(configuration)
        for gpu in range(8):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(f"NodeName=n[0-3] Name=gpu File={folder}/gpu[0-7]\n")
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        munge = ["munged", f"--key-file={folder}/key", f"--socket={folder}/munge.sock"]
        munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"]
        munge += [f"--seed-file={folder}/seed"]
        try:
            for command in (munge, ["slurmctld"], *(["slurmd", "-N", f"n{n}"] for n in range(4))):
                subprocess.run(command, check=True, capture_output=True, env=environment)
            if not _is_up(environment):
                log = (folder / "slurmctld.log").read_text(errors="replace").splitlines()
                raise MissingPeer(f"did not start: {log[-1] if log else 'its log is empty'}")
            with ExitStack() as running:
                yield lambda clients: [
                    running.enter_context(_client(client[0], environment)) for _ in range(clients)
                ]
        finally:
            for path in sorted(folder.glob("*.pid"), reverse=True):
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGTERM)
            time.sleep(5)  # until the controller has written its state


def _is_up(environment: dict[str, str]) -> bool:
    """Return whether all four nodes are idle, and a request for more GPUs than a node has is refused."""
    deadline = time.monotonic() + 60
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]

    def states() -> list[str]:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return shown.stdout.split()

    while states() != ["idle"] * 4:
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    too_many = ["srun", "--gres=gpu:9", "true"]
    return subprocess.run(too_many, capture_output=True, check=False, env=environment).returncode != 0


@contextmanager
def _client(program: str, environment: dict[str, str]) -> Iterator[Pair]:
    """Run slurm_pairs; yield a function that has it do one pair."""
    quiet = subprocess.DEVNULL  # it tells of every job that waits until the one before is cleaned up
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [program], stdin=pipe, stdout=pipe, stderr=quiet, text=True, env=environment
    ) as done:
        assert done.stdin is not None
        assert done.stdout is not None

        def pair(timeout_s: float) -> bool:
            done.stdin.write("\n")
            done.stdin.flush()
            if done.stdout.readline() != "done\n":
                raise RuntimeError("Slurm granted or released nothing")
            return True

        yield pair
        done.stdin.close()


# ---- the comparison ----


def of_daemons(running: Callable[[], AbstractContextManager[Clients]]) -> dict[str, Any]:
    """Measure clients of this process on a peer that runs meanwhile."""
    with running() as make:
        return {
            case: in_threads(make(clients), SECONDS[case]) for case, clients in (("one", 1), ("full", 32))
        }


def of_redis(kind: str) -> dict[str, Any]:
    figures: dict[str, Any] = {"one": in_processes(kind, "one", 1)}
    if kind == "this":  # one lock is not 16 places
        figures["full"] = in_processes(kind, "full", 32)
    for clients in (50, 100):
        figures[f"held_{clients}"] = in_processes(kind, "held", clients)
    return figures


PEERS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, str]]] = {
    "this": (partial(of_redis, "this"), {}),
    "redis_lock": (partial(of_redis, "redis_lock"), {}),
    "slurm": (partial(of_daemons, partial(slurm_pairs, "")), {}),
    "slurm_with_epilog": (partial(of_daemons, partial(slurm_pairs, "/bin/true")), {}),
    "ray": (partial(of_daemons, ray_pairs), {}),
    "ray_tuned": (partial(of_daemons, ray_pairs), TUNED),
}
"""Name -> its measurement and environment."""


def main(names: Sequence[str]) -> None:
    """Measure each peer in a process of its own, for its environment, and print all as JSON."""
    figures: dict[str, Any] = {"missing": {}}
    for name in names or PEERS:
        environment = {**os.environ, **PEERS[name][1]}
        done = subprocess.run(
            [sys.executable, __file__, "peer", name], env=environment, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SystemExit(f"{name} could not be measured")
        figures[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, figures[name], file=sys.stderr, flush=True)
        if "missing" in figures[name]:
            figures["missing"][name] = figures.pop(name)["missing"]
    print(json.dumps(figures))


def peer(name: str) -> None:
    try:
        figures = PEERS[name][0]()
    except MissingPeer as error:
        figures = {"missing": str(error)}
    print(json.dumps(figures))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["child", kind, case, url, number, clients]:
            child(kind, case, url, int(number), int(clients))
        case ["peer", name]:
            peer(name)
        case names:
            main(names)
