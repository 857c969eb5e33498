"""Stand-in for `nvidia-cuda-mps-control`, as its manual describes it; it shares nothing.

`-d` starts a daemon, which writes its process id into `CUDA_MPS_PIPE_DIRECTORY`, and a log; a second one
there is refused. Without options it takes commands on standard input, of which it knows `quit`. What it does
beyond is told by files in the folder `MPS_STANDIN`: `refuses` (its text), `deaf` (it does not quit).
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


def install(folder: Path) -> Path:
    """Put the stand-in into a folder for `PATH`, and return that of the files that tell it what to do."""
    program = folder / CONTROL
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {CONTROL} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def _runs(process: int | str) -> bool:
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())  # empty of one that has died
    except OSError:
        return False


def main() -> int:
    pipes, logs = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
    told, mark = Path(os.environ["MPS_STANDIN"]), pipes / f"{CONTROL}.pid"
    if sys.argv[2:] == ["-d"]:
        if (told / "refuses").exists():
            print((told / "refuses").read_text(), file=sys.stderr)
            return 1
        if mark.exists() and _runs(mark.read_text()):
            print(f"An instance of this daemon is already running in {pipes}", file=sys.stderr)
            return 1
        daemon = subprocess.Popen(
            [sys.executable, __file__, CONTROL, "--daemon"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        mark.write_text(str(daemon.pid))
        (logs / "control.log").write_text(f"started for {os.environ['CUDA_VISIBLE_DEVICES']}\n")
        return 0
    if sys.argv[2:] == ["--daemon"]:
        signal.pause()
    for line in sys.stdin:
        if line.strip() == "quit" and not (told / "deaf").exists():
            process = int(mark.read_text())
            os.kill(process, signal.SIGTERM)
            mark.unlink()
            while _runs(process):
                time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main())
