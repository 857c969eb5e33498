"""Run pytest while its processes, and those that they start, pause for a second now and then.

`python -m tests.pauses [--seed N] [arguments of pytest]`: a test that fails only here has a deadline that a
busy machine misses. Tests that measure time are not meant to pass: leave them out with `-k`.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

PAUSE_S = 1.0
BETWEEN_S = (1.0, 5.0)


def pause_one(root: psutil.Process, rng: random.Random, over: threading.Event) -> None:
    """Stop one process below `root`, or `root` itself, for `PAUSE_S`."""
    with suppress(psutil.Error):
        chosen = rng.choice([root, *root.children(recursive=True)])
        if chosen.status() == psutil.STATUS_STOPPED:  # by a test, which also continues it
            return
        chosen.send_signal(signal.SIGSTOP)
        over.wait(PAUSE_S)
        chosen.send_signal(signal.SIGCONT)


def main(arguments: list[str]) -> int:
    seed = 0
    if arguments[:1] == ["--seed"]:
        seed, arguments = int(arguments[1]), arguments[2:]
    rng, over = random.Random(seed), threading.Event()
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])

    def pause() -> None:
        root = psutil.Process(process.pid)
        while not over.wait(rng.uniform(*BETWEEN_S)):
            pause_one(root, rng, over)

    pausing = threading.Thread(target=pause)
    pausing.start()
    try:
        return process.wait()
    finally:
        over.set()
        pausing.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
