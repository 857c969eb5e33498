"""Job that writes into a ledger, five times a second, that it runs and on which GPUs.

The ledger is independent of the manager's history. With `SAVES_FOR_S` the job can go on later: each line is a
step, and after SIGTERM, which `told` notes, it runs on for so long, saves the number of its steps and leaves.
`SAVES_TO` names the file for that, `BEAT_S` the time between two lines.
"""

import json
import os
import signal
import sys
import time

PREEMPTED = 75
"""Exit code of a job that has saved and can go on."""


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
    saves_for_s, told = os.environ.get("SAVES_FOR_S"), []
    if saves_for_s:
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(time.time()))
        checkpoint, entry["restart"], entry["step"] = go_on(entry["member"])
    print("the job begins", flush=True)
    end = time.time() + seconds
    told_to_end = f"{ledger}-end-{entry['task'].replace('/', '-')}"
    while True:
        line = json.dumps({**entry, "at": time.time()}) + "\n"
        descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        if saves_for_s:
            entry |= {"step": entry["step"] + 1, "told": bool(told)}
        if told and time.time() >= told[0] + float(saves_for_s):
            with open(checkpoint, "w") as file:
                file.write(str(entry["step"]))
            sys.exit(PREEMPTED)
        if time.time() >= end or os.path.exists(told_to_end):
            break
        time.sleep(float(os.environ.get("BEAT_S", "0.2")))
    print(f"beat on {entry['gpus']} of {entry['server']}", flush=True)
    sys.exit(exit_code)


def go_on(member):
    """Return the checkpoint, how often the job was preempted and the first step of this process.

    Each member of a gang has a checkpoint of its own: one is told a moment before another.
    """
    checkpoint = (os.environ.get("SAVES_TO") or os.environ["GPU_CHECKPOINT_FILE"]) + member
    step = 0
    if os.path.exists(checkpoint):
        with open(checkpoint) as file:
            step = int(file.read())
    return checkpoint, os.environ["GPU_RESTART_COUNT"], step


if __name__ == "__main__":
    main()
