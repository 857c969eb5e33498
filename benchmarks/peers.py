"""Comparison with other schedulers on the same work: `python benchmarks/peers.py`, or `make bench-peers`.

Work: grant 4 GPUs and 32 CPUs of 4 servers x 8 GPUs x 64 CPUs to an empty task, and release them. Peers: a
bare redis-py lock (always), Ray placement groups (`make` installs Ray in a separate environment), a separate
Slurm with the same fake inventory (if slurm-wlm is installed, as root), whose `srun` also starts the task.
All are measured in one run; printed are rates and their ratios to this project's.
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
from contextlib import contextmanager, suppress
from pathlib import Path

from demo.stack import free_ports
from resource_manager.cli.bench.store import interleaved, lock_pair, manager_pair, redis_server

Pair = Callable[[], object]


def ray_pair() -> tuple[Pair | None, str]:
    """Return a function that creates and removes a placement group on a local Ray, or None and the reason."""
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ModuleNotFoundError:
        return None, "not installed: pip install ray"
    # Otherwise Ray would start a process for each of the 256 declared CPUs, which do not exist.
    os.environ.update(RAY_enable_worker_prestart="0", RAY_prestart_worker_first_driver="0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    try:
        ray.init(
            num_cpus=256, num_gpus=32, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
    except Exception as error:  # Ray has no specific exception for this
        return None, f"did not start: {str(error).partition('.')[0]}"

    def pair() -> None:
        group = placement_group([{"GPU": 4, "CPU": 32}], strategy="STRICT_PACK")
        ray.get(group.ready())
        remove_placement_group(group)

    return pair, ""


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
"""
NODE = (
    "NodeName=n{n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=1000 Gres=gpu:8"
)


@contextmanager
def slurm_cluster() -> Iterator[str]:
    """Run a Slurm with the same inventory on this machine; yield "", or the reason if there is none."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        yield f"not installed: {', '.join(missing)} (Debian: slurm-wlm)" if missing else "needs root"
        return
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        folder.chmod(0o755)  # munged requires a socket that every user can reach
        ports = free_ports(5)
        nodes = "\n".join(NODE.format(n=n, port=port) for n, port in enumerate(ports[1:]))
        (folder / "slurm.conf").write_text(SLURM.format(folder=folder, ports=ports, nodes=nodes))
        for gpu in range(8):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(f"NodeName=n[0-3] Name=gpu File={folder}/gpu[0-7]\n")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        munge = ["munged", f"--key-file={folder}/key", f"--socket={folder}/munge.sock"]
        munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"]
        try:
            subprocess.run([*munge, f"--seed-file={folder}/seed"], check=True, capture_output=True)
            subprocess.run(["slurmctld"], check=True, capture_output=True)
            for n in range(4):
                subprocess.run(["slurmd", "-N", f"n{n}"], check=True, capture_output=True)
            yield "" if _is_up() else f"it did not start: see {folder}/slurmctld.log"
        finally:
            for path in sorted(folder.glob("*.pid"), reverse=True):
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGTERM)
            time.sleep(5)  # until the controller has written its state


def _is_up() -> bool:
    """Return whether all four nodes are idle, and a request for more GPUs than a node has is refused."""
    deadline = time.monotonic() + 60
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while subprocess.run(command, capture_output=True, text=True, check=False).stdout.split() != ["idle"] * 4:
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return subprocess.run(["srun", "--gres=gpu:9", "true"], capture_output=True, check=False).returncode != 0


def slurm_step() -> None:
    subprocess.run(["srun", "--gres=gpu:4", "--cpus-per-task=32", "true"], check=True, capture_output=True)


def main() -> None:
    missing: dict[str, str] = {}
    with redis_server(None) as url, slurm_cluster() as no_slurm:
        pairs: dict[str, Pair] = {"this": manager_pair(url, servers=4), "redis_lock": lock_pair(url)}
        pair, no_ray = ray_pair()
        if pair is None:
            missing["ray"] = no_ray
        else:
            pairs["ray"] = pair
        if no_slurm:
            missing["slurm"] = no_slurm
        else:
            pairs["slurm"] = slurm_step
        rates = dict(zip(pairs, interleaved(list(pairs.values()), seconds=6.0), strict=True))
    with suppress(ModuleNotFoundError):
        import ray

        ray.shutdown()
    result = {
        "pairs_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "of_ours": {name: round(rate / rates["this"], 3) for name, rate in rates.items()},
        "missing": missing,
    }
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
