"""Processes of the benchmarks: a service on a free port, and clients that begin together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import psutil

from demo.stack import answers, free_ports, wait_until


@contextmanager
def service(
    store: str, *options: str, log: IO[str] | int = subprocess.DEVNULL, **settings: str
) -> Iterator[tuple[str, psutil.Process]]:
    """Run `gpu-manager serve` on a store; yield its address and its process, once it listens."""
    [port] = free_ports(1)
    program = [sys.executable, "-m", "resource_manager.cli", "--store", store, "serve", "--port", str(port)]
    process = subprocess.Popen([*program, *options], env={**os.environ, **settings}, stderr=log)
    try:
        wait_until(lambda: answers(port), 60.0, "the service did not start")
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def cpu_s(*processes: psutil.Process) -> float:
    """Return the processor time that the processes have taken."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def together(command: Sequence[str], processes: int, before: Callable[[], object] = int) -> list[Any]:
    """Run a program in so many processes, their numbers as last argument; return the JSON that each prints.

    Each prints a line once it is ready, and begins when it reads one, which all are given after `before`.
    """
    children = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    before()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    return [json.loads(child.communicate()[0]) for child in children]
