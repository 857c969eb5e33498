"""Comparison with other schedulers on the same work: `python benchmarks/peers.py`, or `make bench-peers`.

Work: grant 4 GPUs and 32 CPUs of 4 servers x 8 GPUs x 64 CPUs, and release them; no process is started.
Peers: a bare redis-py lock (always), Ray placement groups (`make` installs Ray in a separate environment),
and a separate Slurm with the same fake inventory through its C API, once without and once with an epilog (as
root, if Debian's slurm-wlm, libslurm-dev and gcc are installed). One after the other, so that the daemons of
one do not slow down another; printed are rates and their ratios to this project's.

Ray is tuned for this work: by default it looks for freed resources ten times a second, which is all that
would be measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from demo.stack import free_ports
from resource_manager.cli.bench.store import interleaved, lock_pair, manager_pair, redis_server

Pair = Callable[[], object]


@contextmanager
def ray_pair() -> Iterator[tuple[Pair | None, str]]:
    """Run Ray; yield a function that creates and removes a placement group, or None and the reason."""
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ModuleNotFoundError:
        yield None, "not installed: pip install ray"
        return
    os.environ.update(
        # Otherwise Ray would start a process for each of the 256 declared CPUs, which do not exist.
        RAY_enable_worker_prestart="0",
        RAY_prestart_worker_first_driver="0",
        # The default is 100 ms for both.
        RAY_raylet_report_resources_period_milliseconds="1",
        RAY_gcs_create_placement_group_retry_min_interval_ms="1",
    )
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    try:
        ray.init(
            num_cpus=256, num_gpus=32, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
    except Exception as error:  # Ray has no specific exception for this
        yield None, f"did not start: {str(error).partition('.')[0]}"
        return

    def pair() -> None:
        group = placement_group([{"GPU": 4, "CPU": 32}], strategy="STRICT_PACK")
        if not group.wait(60):
            raise RuntimeError("Ray granted nothing within 60 s")
        remove_placement_group(group)

    try:
        yield pair, ""
    finally:
        ray.shutdown()


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
def slurm_pair(epilog: str) -> Iterator[tuple[Pair | None, str]]:
    """Run a Slurm with the same inventory; yield a function for one pair on it, or None and the reason.

    `epilog` is the program that Slurm runs on the server after each job; "" for none.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd", "cc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        packages = "Debian: slurm-wlm, libslurm-dev, gcc"
        yield None, f"not installed: {', '.join(missing)} ({packages})" if missing else "needs root"
        return
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        client = [f"{folder}/slurm_pairs", str(Path(__file__).with_name("slurm_pairs.c")), "-lslurm"]
        if subprocess.run(["cc", "-O2", "-o", *client], capture_output=True, check=False).returncode:
            yield None, "slurm_pairs.c cannot be built: install libslurm-dev"
            return
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
                yield None, f"it did not start: see {folder}/slurmctld.log"
                return
            with _client(client[0], environment) as pair:
                yield pair, ""
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

        def pair() -> None:
            done.stdin.write("\n")
            done.stdin.flush()
            if done.stdout.readline() != "done\n":
                raise RuntimeError("Slurm granted or released nothing")

        yield pair
        done.stdin.close()


@contextmanager
def this_pair() -> Iterator[tuple[Pair, str]]:
    with redis_server(None) as url:
        yield manager_pair(url, servers=4), ""


@contextmanager
def redis_lock_pair() -> Iterator[tuple[Pair, str]]:
    with redis_server(None) as url:
        yield lock_pair(url), ""


PEERS: dict[str, Callable[[], AbstractContextManager[tuple[Pair | None, str]]]] = {
    "this": this_pair,
    "redis_lock": redis_lock_pair,
    "ray": ray_pair,
    "slurm": lambda: slurm_pair(""),
    "slurm_with_epilog": lambda: slurm_pair("/bin/true"),
}


def main() -> None:
    rates: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, running in PEERS.items():
        with running() as (pair, reason):
            if pair is None:
                missing[name] = reason
            else:
                [rates[name]] = interleaved([pair], seconds=6.0)
    result = {
        "pairs_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "of_ours": {name: round(rate / rates["this"], 3) for name, rate in rates.items()},
        "missing": missing,
    }
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
