"""Somebody's own program that takes GPUs from the service: python -m tests.jobs.rest_program URL COMMAND…

It renews its lease and ends once that is refused, or cannot be renewed in time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.rest.client import ServiceClient
from tests.faults.quick import TTL_S

LEASE_ID = "own/program"


def main() -> None:
    client = ServiceClient(sys.argv[1], timeout_s=2.0)
    lease = client.allocate_resources(LEASE_ID, 2, 1, ttl=TTL_S)
    assert lease is not None
    own = {
        "GPU_LEASE_ID": LEASE_ID,
        "GPU_SERVER": lease["server_name"],
        "GPU_LEASE_GPUS": "0,1",
        "GPU_LEASE_FENCING_TOKEN": str(lease["fencing_token"]),
    }
    job = subprocess.Popen(sys.argv[2:], env={**os.environ, **own})
    renewed_at = time.monotonic()
    try:
        while job.poll() is None and time.monotonic() < renewed_at + 0.7 * TTL_S:
            time.sleep(TTL_S / 12)
            try:
                told = client.renew(LEASE_ID, fencing_token=lease["fencing_token"])
                renewed_at = time.monotonic()
                taken = told["preempted_by"] and f"preempted for {told['preempted_by']}"
                if why := told["gpu_failed"] or taken:
                    print(f"ending: {why}", flush=True)
                    break
            except LeaseNotFoundError as error:
                print(f"ending: {error}", flush=True)
                return
            except ResourceManagerError as error:
                print(f"not renewed: {error}", flush=True)
    finally:
        job.kill()
        job.wait()
    client.release_resources(LEASE_ID, fencing_token=lease["fencing_token"])


if __name__ == "__main__":
    main()
