"""The same work on what else is installed: `python benchmarks/peers.py`, or `make bench-peers`.

Work: grant 4 GPUs and 32 CPUs of 4 servers x 8 GPUs x 64 CPUs to a task that does nothing, and take them
back. Peers: a bare redis-py lock (always), Ray placement groups (if `ray` imports), Slurm (if `srun`
reaches a controller). All in one run; rates and the ratios to ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from resource_manager.bench import interleaved, lock_pair, manager_pair, redis_server

Pair = Callable[[], object]


def ray_pair() -> tuple[Pair | None, str]:
    """A placement group on a local Ray that is told to have our inventory."""
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ModuleNotFoundError:
        return None, "not installed: pip install ray"
    ray.init(num_cpus=256, num_gpus=32, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def pair() -> None:
        group = placement_group([{"GPU": 4, "CPU": 32}], strategy="STRICT_PACK")
        ray.get(group.ready())
        remove_placement_group(group)

    return pair, ""


def slurm_pair() -> tuple[Pair | None, str]:
    """A job step of `true` on a Slurm whose controller has been given the same inventory."""
    if shutil.which("srun") is None:
        return None, "not installed: srun is not on PATH"
    probe = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return None, f"no controller: {probe.stderr.strip().splitlines()[0] if probe.stderr else 'no answer'}"

    def pair() -> None:
        subprocess.run(["srun", "--gres=gpu:4", "--cpus-per-task=32", "true"], check=True)

    return pair, ""


def main() -> None:
    missing: dict[str, str] = {}
    with redis_server(None) as url:
        pairs: dict[str, Pair] = {"this": manager_pair(url, servers=4), "redis_lock": lock_pair(url)}
        for name, make in (("ray", ray_pair), ("slurm", slurm_pair)):
            pair, reason = make()
            if pair is None:
                missing[name] = reason
            else:
                pairs[name] = pair
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
