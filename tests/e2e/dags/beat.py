"""Job that writes into a ledger, five times a second, that it runs and on which GPUs.

The ledger is independent of the manager's history.
"""

import json
import os
import signal
import sys
import time


def main():
    if os.environ.get("IGNORES_SIGTERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ledger, seconds, exit_code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    entry = {
        "task": os.environ["GPU_LEASE_ID"],
        "server": os.environ["GPU_SERVER"],
        "gpus": os.environ["GPU_LEASE_GPUS"],
        "member": os.environ.get("GPU_NODE_RANK", ""),
        "process": f"{os.environ['GPU_LEASE_FENCING_TOKEN']}-{os.getpid()}-{time.monotonic()}",
    }
    print("the job begins", flush=True)
    end = time.time() + seconds
    told_to_end = f"{ledger}-end-{entry['task'].replace('/', '-')}"
    while True:
        line = json.dumps({**entry, "at": time.time()}) + "\n"
        descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        if time.time() >= end or os.path.exists(told_to_end):
            break
        time.sleep(0.2)
    print(f"beat on {entry['gpus']} of {entry['server']}", flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
