"""Every way to GPUs × every fault that can meet it: what happens to the job, to its GPUs, and what is said.

In each cell a job runs, another request waits for its GPUs, and something breaks. Seen from the outside: its
processes, its lease, the words in the terminal or the task's log. Whenever the GPUs are granted again, no
process of the job may be there; a server here is a machine to its programs (`tests.faults.machines`).
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from tests.faults.machines import Machines, Program, python, what_is_missing
from tests.jobs.ways import PATIENCE_S, SETTLED_S, Site

SITES = 6
"""Cells that are played at once, each on two machines of its own: they mostly wait."""


# ---- ways ----


def task(kind: str, *, on_its_server: bool) -> Callable[..., Program]:
    def start(site: Site, *, attempt: int = 1, **more: str) -> Program:
        command = python("-m", "tests.jobs.task_program", kind, str(attempt))
        return site.spawn(*command, machine=site.machine if on_its_server else None, **more)

    return start


def run(*arguments: str, on_its_server: bool) -> Callable[..., Program]:
    def start(site: Site, *, attempt: int = 1, **more: str) -> Program:
        words = ("run", "--gpus", "2", *arguments, "--", *site.job)
        return site.gpu_manager(*words, machine=site.machine if on_its_server else None, **more)

    return start


def lease_around(site: Site, *, attempt: int = 1, **more: str) -> Program:
    """Allocate in a task, and compute in the next one, by a program of the user's own on the server."""
    allocate = task("allocate", on_its_server=False)(site, **more)
    assert allocate.wait(PATIENCE_S) == 0, allocate.said()
    [lease] = site.leases()
    own = {
        "GPU_LEASE_ID": lease["task_id"],
        "GPU_SERVER": lease["server_name"],
        "GPU_LEASE_GPUS": "0,1",
        "GPU_LEASE_FENCING_TOKEN": str(lease["fencing_token"]),
    }
    return site.spawn(*site.job, machine=site.machine, **own)


def hold(site: Site, *, attempt: int = 1, **more: Any) -> Program:
    return site.gpu_manager("hold", "--gpus", "2", "--for", f"{site.settled_s:g}s", **more)


def by_rest(site: Site, *, attempt: int = 1, **more: Any) -> Program:
    url = site.serve()
    return site.spawn(*python("-m", "tests.jobs.rest_program", url, *site.job), **more)


WAYS: dict[str, Callable[..., Program]] = {
    "training here": task("local", on_its_server=True),
    "training by ssh": task("ssh", on_its_server=False),
    "gpu_lease": lease_around,
    "@task.gpu": task("python", on_its_server=True),
    "run here": run(on_its_server=True),
    "run by ssh": run(on_its_server=False),
    "hold": hold,
    "REST": by_rest,
}


# ---- faults ----


def kill_job(site: Site, caller: Program) -> None:
    for process in site.processes():
        process.kill()


def kill_caller(site: Site, caller: Program) -> None:
    """Kill the caller; one that computes itself with all its children, as the end of its container does."""
    own = psutil.Process(caller.pid)
    is_itself = site.way in ("@task.gpu", "REST")
    for process in [*(own.children(recursive=True) if is_itself else []), own]:
        process.kill()


def stop_caller(site: Site, caller: Program) -> None:
    caller.signal(signal.SIGSTOP)


def cut(site: Site, caller: Program) -> None:
    site.server.cut()


def kill_server(site: Site, caller: Program) -> None:
    site.server.die()


def reboot(site: Site, caller: Program) -> None:
    site.server.die()
    site.server.boot()


def silence_store(site: Site, caller: Program) -> None:
    """The store is killed, and comes back after the leases' time to live."""
    site.store.kill()
    time.sleep(SETTLED_S)
    site.store.start()


def preempt(site: Site, caller: Program) -> None:
    site.preempt()


def close_gpu(site: Site, caller: Program) -> None:
    site.close_gpu()


def release(site: Site, caller: Program) -> None:
    site.asked("release", site.lease_id)


def stop(site: Site, caller: Program) -> None:
    site.asked("stop", site.lease_id)


def stop_with_other_folder(site: Site, caller: Program) -> None:
    elsewhere = str(site.folder / "elsewhere")
    site.asked("stop", site.lease_id, machine=site.machine, GPU_MANAGER_JOBS_DIR=elsewhere, HOME=elsewhere)


def stop_as_another(site: Site, caller: Program) -> None:
    site.asked("stop", site.lease_id, machine=site.machine, AS_USER="nobody")


def stop_from_desk(site: Site, caller: Program) -> None:
    site.asked("stop", site.lease_id, machine=site.desk)


FAULTS: dict[str, Callable[[Site, Program], None]] = {
    "its job is killed": kill_job,
    "its caller is killed": kill_caller,
    "its caller is stopped": stop_caller,
    "its server is cut off": cut,
    "its server dies": kill_server,
    "its server reboots": reboot,
    "the store is away": silence_store,
    "stopped with another JOBS_DIR and home": stop_with_other_folder,
    "stopped by another user": stop_as_another,
    "stopped from another machine": stop_from_desk,
    "preempted": preempt,
    "a GPU fails with XID 79": close_gpu,
    "an operator releases it": release,
}


# ---- what then ends it ----


def resume(site: Site, caller: Program) -> None:
    caller.signal(signal.SIGCONT)


def heal(site: Site, caller: Program) -> None:
    site.server.join()


def boot(site: Site, caller: Program) -> None:
    site.server.boot()


def retry(site: Site, caller: Program) -> None:
    WAYS[site.way](site, attempt=2)


def finish(site: Site, caller: Program) -> None:
    site.finish()


def stop_it(site: Site, caller: Program) -> None:
    code, said = site.asked("stop", site.lease_id)
    assert code == 0, said


def say_gone(site: Site, caller: Program) -> None:
    code, said = site.asked("release", site.lease_id, "--gone", "--reason", "it is in pieces")
    assert code == 0, said


def reconcile(site: Site, caller: Program) -> None:
    site.reconcile()


def tear_down(site: Site, caller: Program) -> None:
    for process in site.processes():
        process.kill()
    teardown = site.spawn(*python("-m", "tests.jobs.task_program", "release", "1"))
    assert teardown.wait(PATIENCE_S) == 0, teardown.said()


ENDS: dict[str, Callable[[Site, Program], None]] = {
    "it goes on": resume,
    "the network heals": heal,
    "the server boots": boot,
    "the next try": retry,
    "the job's end": finish,
    "stop": stop_it,
    "release --gone": say_gone,
    "reconcile": reconcile,
    "the teardown": tear_down,
}


# ---- the table ----


@dataclass(frozen=True)
class Cell:
    """Outcome: the job `goes on`, or `ends` (`is none` for a lease without one); then its GPUs are `free`.

    Or they are `kept`, and free only after these `ends`, in their order. `said` is a pattern for what any
    program says. `lost`: one failed, so they do not serve the other request any more; the lease has ended.
    """

    job: str
    gpus: str
    ends: tuple[str, ...] = ()
    said: str = ""


def ends(gpus: str = "free", *how: str, said: str = "") -> Cell:
    return Cell("ends", gpus, how, said)


def goes_on(*how: str, said: str = "") -> Cell:
    return Cell("goes on", "kept", how, said)


OWN_WORD = "nothing of ours was placed: who ends the lease says that its program is over"

TABLE: dict[str, dict[str, Cell | str]] = {
    "training here": {
        "its job is killed": ends(said="exit code 137"),
        "its caller is killed": goes_on(
            "the next try", "the job's end", said="started by an earlier execution"
        ),
        "its caller is stopped": goes_on("it goes on", "the job's end"),
        "its server is cut off": goes_on("the network heals", "the job's end"),
        "its server dies": ends("kept", "release --gone"),
        "its server reboots": ends(
            "kept", "the next try", said="did not end with an exit code|vanished|failed"
        ),
        "the store is away": goes_on("the job's end"),
        "stopped with another JOBS_DIR and home": ends(said="its job was stopped"),
        "stopped by another user": goes_on("the job's end", said="may still run"),
        "stopped from another machine": goes_on("the job's end", said="ask from there"),
        "preempted": ends(said="preempted"),
        "a GPU fails with XID 79": ends("lost", said="xid 79"),
        "an operator releases it": goes_on("the job's end", said="stop it instead"),
    },
    "training by ssh": {
        "its job is killed": ends(said="exit code 137"),
        "its caller is killed": goes_on(
            "the next try", "the job's end", said="started by an earlier execution"
        ),
        "its caller is stopped": goes_on("it goes on", "the next try", "the job's end"),
        "its server is cut off": goes_on(
            "the network heals", "the next try", "the job's end", said="stay allocated"
        ),
        "its server dies": ends("kept", "release --gone", said="stay allocated"),
        "its server reboots": ends(said="failed"),
        "the store is away": goes_on("the job's end"),
        "stopped with another JOBS_DIR and home": ends(said="its job was stopped"),
        "stopped by another user": goes_on("the job's end", said="may still run"),
        "stopped from another machine": ends(said="its job was stopped"),
        "preempted": ends(said="preempted"),
        "a GPU fails with XID 79": ends("lost", said="xid 79"),
        "an operator releases it": goes_on("the job's end", said="stop it instead"),
    },
    "gpu_lease": {
        "its job is killed": ends("kept", "the teardown"),
        "its caller is killed": "the allocating task has ended; the tasks between have their own callers",
        "its caller is stopped": "the allocating task has ended; the tasks between have their own callers",
        "its server is cut off": goes_on("the network heals", "the teardown"),
        "its server dies": ends("kept", "the teardown"),
        "its server reboots": ends("kept", "the teardown"),
        "the store is away": goes_on("the teardown"),
        "stopped with another JOBS_DIR and home": "it has no job of ours to look for: stop is release",
        "stopped by another user": "it has no job of ours to look for: stop is release",
        "stopped from another machine": "it has no job of ours to look for: stop is release",
        "preempted": "a lease of a run is not preempted: its tasks cannot be told",
        "a GPU fails with XID 79": Cell("goes on", "lost", ("the teardown",)),
        "an operator releases it": OWN_WORD,
    },
    "@task.gpu": {
        "its job is killed": ends(said="the try failed"),
        "its caller is killed": ends(),
        "its caller is stopped": "a worker that sleeps with its children is one that Airflow misses and ends",
        "its server is cut off": ends(said="could not be renewed"),
        "its server dies": ends(),
        "its server reboots": ends(),
        "the store is away": ends(said="could not be renewed"),
        "stopped with another JOBS_DIR and home": goes_on("the job's end", said="its process may still run"),
        "stopped by another user": goes_on("the job's end", said="its process may still run"),
        "stopped from another machine": goes_on("the job's end", said="its process may still run"),
        "preempted": "@task.gpu is not preemptible",
        "a GPU fails with XID 79": ends("lost", said="xid 79"),
        "an operator releases it": "its process ends itself at the next renewal, within a quarter of its TTL",
    },
    "run here": {
        "its job is killed": ends(),
        "its caller is killed": ends("kept", "reconcile"),
        "its caller is stopped": ends("kept", "it goes on"),
        "its server is cut off": goes_on("the network heals", "the job's end", said="could not be renewed"),
        "its server dies": ends("kept", "release --gone"),
        "its server reboots": ends("kept", "stop"),
        "the store is away": goes_on("the job's end", said="could not be renewed"),
        "stopped with another JOBS_DIR and home": ends(said="its job was stopped"),
        "stopped by another user": goes_on("the job's end", said="may still run"),
        "stopped from another machine": ends(said="its job was stopped"),
        "preempted": ends(said="preempted for rival"),
        "a GPU fails with XID 79": ends("lost", said="xid 79"),
        "an operator releases it": goes_on("the job's end", said="stop it instead"),
    },
    "run by ssh": {
        "its job is killed": ends(),
        "its caller is killed": ends("kept", "reconcile"),
        "its caller is stopped": ends("kept", "it goes on"),
        "its server is cut off": ends("kept", "the network heals", "stop", said="may still run"),
        "its server dies": ends("kept", "release --gone", said="may still run"),
        "its server reboots": ends(),
        "the store is away": goes_on("the job's end", said="could not be renewed"),
        "stopped with another JOBS_DIR and home": ends(said="its job was stopped"),
        "stopped by another user": goes_on("the job's end", said="may still run"),
        "stopped from another machine": ends(said="its job was stopped"),
        "preempted": ends(said="preempted for rival"),
        "a GPU fails with XID 79": ends("lost", said="xid 79"),
        "an operator releases it": goes_on("the job's end", said="stop it instead"),
    },
    "hold": {
        "its job is killed": "it has no job",
        "its caller is killed": "it ends when the GPUs are granted",
        "its caller is stopped": "it ends when the GPUs are granted",
        "its server is cut off": Cell("is none", "free"),
        "its server dies": Cell("is none", "free"),
        "its server reboots": Cell("is none", "free"),
        "the store is away": Cell("is none", "free"),
        "stopped with another JOBS_DIR and home": Cell("is none", "free", said="it had no job"),
        "stopped by another user": Cell("is none", "free", said="it had no job"),
        "stopped from another machine": Cell("is none", "free", said="it had no job"),
        "preempted": Cell("is none", "free"),
        "a GPU fails with XID 79": Cell("is none", "lost"),
        "an operator releases it": Cell("is none", "free"),
    },
    "REST": {
        "its job is killed": ends(),
        "its caller is killed": ends(),
        "its caller is stopped": "who sleeps beyond its TTL has lost its GPUs, and ends its own children",
        "its server is cut off": "it computes where its owner started it",
        "its server dies": "it computes where its owner started it",
        "its server reboots": "it computes where its owner started it",
        "the store is away": ends(said="not renewed"),
        "stopped with another JOBS_DIR and home": OWN_WORD,
        "stopped by another user": OWN_WORD,
        "stopped from another machine": OWN_WORD,
        "preempted": ends(said="preempted"),
        "a GPU fails with XID 79": ends("lost", said="xid 79"),
        "an operator releases it": OWN_WORD,
    },
}


def play(site: Site, way: str, fault: str) -> None:
    """Play one cell; raises what was not as it should be."""
    cell = TABLE[way][fault]
    assert isinstance(cell, Cell)
    caller = WAYS[way](site)
    site.begun(has_job=cell.job != "is none")
    if fault != "preempted":
        site.compete()
    FAULTS[fault](site, caller)
    if cell.job == "ends":
        site.until(lambda: not site.processes(), "the job's end")
    elif cell.job == "goes on":
        site.holds(site.processes, "the job should go on", site.settled_s)
    if cell.gpus == "kept":
        site.holds(lambda: not site.has_rival(), "its GPUs must be kept", site.settled_s)
    for end in cell.ends:
        assert not site.has_rival(), f"its GPUs were granted before {end}"
        ENDS[end](site, caller)
        if end in ("the network heals", "it goes on"):
            time.sleep(1.0)
    if cell.gpus == "lost":
        site.until(site.has_ended, "the lease's end")
    else:
        site.until(site.has_rival, "the grant of its GPUs to the other request")
    if cell.said:
        site.until(lambda: re.search(cell.said, site.words(), re.I), f"the words {cell.said!r}")


# ---- what never starts, and what would start late ----

NEVER_STARTS: dict[str, dict[str, str]] = {
    "training here": {"its folder cannot be written": "cannot be started on"},
    "training by ssh": {
        "the host key has changed": "host key",
        "the server is cut off": "does not answer by ssh",
    },
    "run here": {"its folder cannot be written": "cannot be started on"},
    "run by ssh": {
        "the host key has changed": "host key",
        "the server is cut off": "does not answer by ssh",
    },
}
"""What is said where it is known that no job was started: its GPUs are free at once."""


def change_host_key(site: Site) -> None:
    site.trust_host_key()
    site.server.new_host_key()


def spoil_folder(site: Site) -> None:
    (site.server.home / "jobs").touch()


SPOILING: dict[str, Callable[[Site], None]] = {
    "the host key has changed": change_host_key,
    "the server is cut off": lambda site: site.server.cut(),
    "its folder cannot be written": spoil_folder,
}


def play_no_start(site: Site, way: str, fault: str) -> None:
    SPOILING[fault](site)
    caller = WAYS[way](site)
    site.until(lambda: caller.exit_code, "the failure of the start")
    assert re.search(NEVER_STARTS[way][fault], caller.said(), re.I), site.words()
    site.compete()
    assert site.has_rival(), site.words()
    [released] = [change for change in site.manager.history() if change["change"] == "released"]
    assert re.search(NEVER_STARTS[way][fault], released["reason"], re.I), released


LATE_STARTS = ("training here", "training by ssh", "run here", "run by ssh")
"""Ways whose start may be late: its thread or triggerer slept between placing and start."""


def play_late_start(site: Site, way: str, fault: str) -> None:
    caller = WAYS[way](site, HOLD_START=str(site.gate))
    site.until(site.gate.with_name("gate-held").exists, "a start that is held")
    [lease] = site.leases()
    site.compete()
    asked_there = site.machine if way.endswith("here") else None
    code, said = site.asked("stop", lease["task_id"], machine=asked_there)
    assert code == 0, said
    site.until(site.has_rival, "the grant of its GPUs to the other request")
    site.gate.touch()
    site.holds(lambda: not site.processes(), "it must not start any more", 4.0)
    assert site.beats() == []
    site.until(lambda: re.search("has ended already|was ended", caller.said()), "a word about it")


# ---- ways to end a job ----


def asks(*words: str) -> Callable[[Site], None]:
    def ask(site: Site) -> None:
        site.asked(*words, site.lease_id)

    return ask


ENDINGS: dict[str, Callable[[Site], object]] = {
    "stop": asks("stop"),
    "release": asks("release"),
    "release --force": asks("release", "--force"),
    "release --gone": asks("release", "--gone", "--reason", "seen by me", "--"),
    "the console's Release": lambda site: site.press("release"),
    "the console's Stop": lambda site: site.press("stop"),
    "reconcile": lambda site: site.reconcile(),
}

SITUATIONS: dict[str, Callable[[Site, Program], None]] = {
    "its caller is killed": kill_caller,
    "its server is cut off": cut,
    "its server is dead": kill_server,
    "its server has rebooted": reboot,
    "the host key has changed": lambda site, caller: change_host_key(site),
}

FREES: dict[str, dict[str, str]] = {
    "stop": {
        "its caller is killed": "its job was over already",
        "its server is cut off": "",
        "its server is dead": "",
        "its server has rebooted": "its job was over already",
        "the host key has changed": "",
    },
    "release": dict.fromkeys(SITUATIONS, ""),
    "release --force": dict.fromkeys(SITUATIONS, ""),
    "release --gone": dict.fromkeys(SITUATIONS, "released"),
    "the console's Release": dict.fromkeys(SITUATIONS, ""),
    "the console's Stop": {
        "its caller is killed": "its job was over already",
        "its server is cut off": "",
        "its server is dead": "",
        "its server has rebooted": "its job was over already",
        "the host key has changed": "",
    },
    "reconcile": {
        "its caller is killed": "its job was over already",
        "its server is cut off": "",
        "its server is dead": "",
        "its server has rebooted": "its job was over already",
        "the host key has changed": "",
    },
}
"""What is said when the GPUs of a job of `run` by ssh become free; empty where they are kept."""


def play_ending(site: Site, ending: str, situation: str) -> None:
    caller = WAYS["run by ssh"](site)
    site.begun()
    site.compete()
    caller.signal(signal.SIGKILL)
    SITUATIONS[situation](site, caller)
    site.until(lambda: not site.processes(), "the job's end")
    site.until(site.is_quarantined, "its quarantine")
    said = ENDINGS[ending](site)
    if FREES[ending][situation]:
        site.until(site.has_rival, "the grant of its GPUs to the other request")
        assert FREES[ending][situation] in f"{said}{site.words()}", site.words()
        return
    site.holds(lambda: not site.has_rival(), "its GPUs must be kept", 3.0)
    assert re.search("may still run|stop it instead|stays allocated|quarantined", f"{said}{site.words()}")
    say_gone(site, caller)
    site.until(site.has_rival, "the grant of its GPUs to the other request")


# ---- all of them ----

Key = tuple[str, str, str]
"""Name of the test, way and fault of a cell."""


@contextmanager
def playing(
    machines: Machines | None, keys: Sequence[Key], folder: Path
) -> Iterator[dict[Key, Future[None]]]:
    """Play these cells, some at once: on machines of their own, or all on this one."""
    folder.chmod(0o755)  # another user may go through, and is kept out of the jobs by their own folder
    count = max(min(SITES, len(keys)), 1)
    free: SimpleQueue[int] = SimpleQueue()
    for number in range(count):
        free.put(number)

    def play_somewhere(key: Key) -> None:
        test, way, fault = key
        number = free.get()
        try:
            site = Site(machines, number, folder / f"cell-{keys.index(key)}", way)
            try:
                PLAYS[test](site, way, fault)
            finally:
                site.close()
        finally:
            free.put(number)

    pool = ThreadPoolExecutor(count)
    try:
        yield {key: pool.submit(play_somewhere, key) for key in keys}
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(folder)


def chosen(request: pytest.FixtureRequest, *, here: bool) -> list[Key]:
    """Return the cells among the tests of this session."""
    return [
        (item.originalname, str(item.callspec.params["way"]), str(item.callspec.params["fault"]))
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname in PLAYS
        and (item.originalname == test_a_cell_on_this_machine.__name__) is here
    ]


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[Key, Future[None]]]:
    """Play all cells that were chosen; each test waits for its own."""
    if reason := what_is_missing():
        pytest.skip(reason)
    keys = chosen(request, here=False)
    home = Path(tempfile.mkdtemp(prefix="machines-"))
    home.chmod(0o755)
    machines = Machines(home, 2 * min(SITES, len(keys)))
    try:
        with playing(machines, keys, Path(tempfile.mkdtemp(prefix="ways-"))) as played:
            yield played
    finally:
        machines.close()
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def played_here(request: pytest.FixtureRequest) -> Iterator[dict[Key, Future[None]]]:
    with playing(None, chosen(request, here=True), Path(tempfile.mkdtemp(prefix="ways-"))) as played:
        yield played


def cells(table: Mapping[str, Mapping[str, object]]) -> pytest.MarkDecorator:
    chosen = [
        pytest.param(way, fault, id=f"{way}: {fault}")
        for way, row in table.items()
        for fault, cell in row.items()
        if isinstance(cell, Cell) or row is not TABLE.get(way)
    ]
    return pytest.mark.parametrize(("way", "fault"), chosen)


def on_machines(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.e2e(pytest.mark.timeout(900)(test))


HERE = {
    "training here": {"its job is killed": True},
    "@task.gpu": {"its job is killed": True},
    "run here": {"stopped with another JOBS_DIR and home": True},
    "REST": {"its job is killed": True},
}
"""A quick cell of ways that need no other machine; `make test-e2e` plays the whole table."""


@pytest.mark.slow
@cells(HERE)
def test_a_cell_on_this_machine(way: str, fault: str, played_here: dict[Key, Future[None]]) -> None:
    played_here["test_a_cell_on_this_machine", way, fault].result()


@cells(TABLE)
@on_machines
def test_a_cell(way: str, fault: str, played: dict[Key, Future[None]]) -> None:
    played["test_a_cell", way, fault].result()


@cells(NEVER_STARTS)
@on_machines
def test_what_never_started_is_free_at_once(way: str, fault: str, played: dict[Key, Future[None]]) -> None:
    played["test_what_never_started_is_free_at_once", way, fault].result()


@cells({way: {"started late": True} for way in LATE_STARTS})
@on_machines
def test_a_start_that_comes_after_the_stop_starts_nothing(
    way: str, fault: str, played: dict[Key, Future[None]]
) -> None:
    played["test_a_start_that_comes_after_the_stop_starts_nothing", way, fault].result()


@cells(FREES)
@on_machines
def test_a_job_ends_by_who_knows_it(way: str, fault: str, played: dict[Key, Future[None]]) -> None:
    played["test_a_job_ends_by_who_knows_it", way, fault].result()


PLAYS: dict[str, Callable[[Site, str, str], None]] = {
    "test_a_cell": play,
    "test_a_cell_on_this_machine": play,
    "test_what_never_started_is_free_at_once": play_no_start,
    "test_a_start_that_comes_after_the_stop_starts_nothing": play_late_start,
    "test_a_job_ends_by_who_knows_it": play_ending,
}


def test_the_table_is_complete() -> None:
    """A fault that cannot meet a way says why."""
    assert TABLE.keys() == WAYS.keys()
    for way, row in TABLE.items():
        assert row.keys() == FAULTS.keys(), way
