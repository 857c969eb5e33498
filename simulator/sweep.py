"""Many runs over any `concurrent.futures.Executor` (local processes or a Dask cluster), resumable."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread
from typing import Any, Protocol

from resource_manager.errors import how_to_install
from simulator.errors import SimulationError
from simulator.io.files import write_json
from simulator.progress import Progress, no_progress

CONNECT_TIMEOUT = "5s"
"""Time to reach a Dask scheduler."""

ENDED = "a process of the runs was ended from outside, probably for want of memory"
"""What is said of a process that did not end by itself."""


class Case(Protocol):
    """One run: it can be pickled, and equal fingerprints give equal results."""

    def fingerprint(self) -> str: ...


Result = dict[str, Any]
"""Result of a run: JSON values."""


def sweep(
    run: Callable[[Any], Result],
    cases: Sequence[Case],
    executor: Executor,
    *,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> list[Result]:
    """Return the results of `run` on every case, in the order of the cases, the same for every executor.

    With a folder, each result is written there as soon as it is known, and a later sweep of the same cases
    runs only the missing ones. `run` must be a function at module level. An error of a run ends the sweep;
    finished results are kept.
    """
    results: dict[int, Result] = {}
    if folder is not None:
        for place, case in enumerate(cases):
            kept = _read(_file(folder, case))
            if kept is not None:
                results[place] = kept
    progress(len(results), len(cases))
    pending: dict[Future[Result], int] = {
        executor.submit(run, case): place for place, case in enumerate(cases) if place not in results
    }
    try:
        for future in as_completed(pending):
            place = pending[future]
            results[place] = future.result()
            if folder is not None:
                write_json(_file(folder, cases[place]), results[place])
            progress(len(results), len(cases))
    finally:
        for future in pending:
            future.cancel()
    return [results[place] for place in range(len(cases))]


def _file(folder: Path, case: Case) -> Path:
    return folder / f"{hashlib.sha256(case.fingerprint().encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> Result | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:  # damaged, or written by another program: run the case again
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def processes(workers: int | None = None) -> Iterator[Executor]:
    """Yield an executor over that many local processes, at most one per core.

    Raises `SimulationError` if one of them is killed.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers == 1:
        with ThreadPoolExecutor(1) as alone:  # saves starting a process and sending data to it
            yield alone
        return
    others = active_children()
    pool = ProcessPoolExecutor(
        min(workers or cores, cores),
        # A process with threads must not be forked; a fresh one imports what it needs.
        mp_context=get_context("forkserver"),
        initializer=signal,  # a terminal sends Ctrl-C to every process: this one ends the others
        initargs=(SIGINT, SIG_IGN),
    )
    try:
        yield pool
    except BaseException as error:
        # Waiting for runs whose results are lost takes long, and with a second Ctrl-C it would never end.
        with _uninterrupted():
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                if process not in others:
                    process.terminate()
                    process.join()
        if isinstance(error, BrokenExecutor):
            why = f"{ENDED}: use fewer at a time (--workers, or --jobs of vgpu)"
            raise SimulationError(why) from error
        raise
    pool.shutdown()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C, which only the main thread is told of."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal(SIGINT, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGINT, before)


@contextmanager
def dask(address: str) -> Iterator[Executor]:
    """Yield an executor over the Dask cluster there.

    Raises `SimulationError` if it is unreachable, or its workers are killed again and again.
    """
    try:
        from distributed import Client, KilledWorker
    except ModuleNotFoundError as error:
        raise SimulationError(f"Dask is not installed: {how_to_install('dask')}") from error
    if ":" not in address:  # Dask would print a traceback later
        raise SimulationError(f"--dask must be an address such as tcp://host:8786, got {address!r}")
    try:
        client: Any = Client(address, timeout=CONNECT_TIMEOUT, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise SimulationError(f"no Dask scheduler at {address}: {error}") from error
    with client:
        executor: Executor = client.get_executor()
        try:
            yield executor
        except KilledWorker as error:
            raise SimulationError(f"{ENDED}: give the workers at {address} more") from error
