"""State of all, or of one job while it waits, while it runs and after its end; and the output of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from resource_manager.cli import completing
from resource_manager.cli.base import (
    BAD_INPUT,
    INTERVAL,
    REFUSED,
    UNREACHABLE,
    Failure,
    harmless,
    is_terminal,
    one_line,
    print_json,
)
from resource_manager.cli.by_hand import UnknownTaskError, clock_time, entry_of, refuse_waiting
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.session import Session, say
from resource_manager.cli.signals import Interrupted
from resource_manager.cli.target import Target, exit_codes
from resource_manager.manager.answer_words import duration, name_in_words, ranges

if TYPE_CHECKING:
    from resource_manager.jobs.launchers import Launcher
    from resource_manager.manager.stored_jobs import JobResult

AGENT = "agent"
LOOK_EVERY_S = 1.0


class Part(NamedTuple):
    """Part of a job's output: its text, where the next one begins, and the state of the job."""

    text: str
    after: int
    state: str


Read = Callable[[int], Part]


@main.command()
@click.argument("name", required=False, shell_complete=completing.tasks)
@click.option("--watch", "interval_s", is_flag=False, flag_value=2.0, type=INTERVAL, help="Repeat so often.")
@wide_option
@on_target
def status(target: Target, name: str | None, interval_s: float | None, wide: bool, as_json: bool) -> None:
    """Show servers, leases and the queue; or one lease or pending request, and how its job ended."""
    if name is not None:
        if interval_s is not None:
            raise Failure("--watch goes without a name", BAD_INPUT)
        _show_job(target, name, as_json=as_json)
        return
    if interval_s is None:
        _show_status(target, wide, as_json)
        return
    from rich.live import Live

    with suppress(Interrupted), Session(target) as session:
        if as_json or not tables.console().is_interactive:
            session.ask(lambda manager: _show_status(target, wide, as_json))
            while True:
                session.signals.pause(interval_s)
                _, trouble = session.ask_again(lambda manager: _show_status(target, wide, as_json), None)
                if trouble:
                    say(trouble)
        shown = session.ask(lambda manager: _status(target))
        with Live(shown, console=tables.console(), screen=True) as live:
            while True:
                session.signals.pause(interval_s)
                shown, trouble = session.ask_again(lambda manager: _status(target), shown)
                live.update(tables.headed(trouble, shown))


def _show_status(target: Target, wide: bool, as_json: bool) -> None:
    if as_json:
        print_json(target.manager.summary())
    else:
        shown = _status(target)  # before rich is loaded, since this may fail
        _show_notices(target)
        tables.console(wide=wide).print(shown)


def _status(target: Target) -> Any:
    manager = target.manager
    return tables.status(manager.summary(), manager.leases(), manager.queue())


def _show_notices(target: Target) -> None:
    """Print on standard error what is wrong with the cluster, or with the file that this process names."""
    summary, path = target.manager.summary(), target.configured().inventory
    if path is None and not summary.get("misconfigured"):
        return
    from resource_manager.manager.notices import notices_of

    for line in notices_of(summary, path, target.manager.diff):
        click.echo(target.placed(line), err=True)


@main.command()
@click.argument("name", shell_complete=completing.leases)
@click.option("-f", "--follow", is_flag=True, help="Wait for the job to begin, and go on until it ends.")
@click.option("--rank", type=click.IntRange(0), help="Member of a gang; default: the first.")
@click.pass_obj
@exit_codes
def logs(target: Target, name: str, follow: bool, rank: int | None) -> None:
    """Print the output of a lease's job; that of an agent's also after its end, by the lease's full id."""
    entry, result = _entry_or_result(target.manager, name)
    while follow and entry is not None and not entry.get("job_places") and _will_be_placed(entry):
        time.sleep(LOOK_EVERY_S)
        entry, result = _entry_or_result(target.manager, entry["task_id"])
    if entry is not None:
        refuse_waiting(entry)
    with _reading(target.manager, name, entry, result, rank) as read:
        offset, has_begun = 0, False
        while True:
            part = read(offset)
            has_begun = has_begun or part.state != "absent"
            if part.state == "absent" and result is not None:
                raise Failure(f"the output of {name} is not kept any more", REFUSED)
            click.echo(harmless(part.text) if is_terminal(sys.stdout) else part.text, nl=False)
            may_begin = follow and not has_begun and _is_there_still(target.manager, entry)
            if part.after != offset:
                offset = part.after
            elif (follow and part.state == "running") or may_begin:
                time.sleep(LOOK_EVERY_S)
            else:
                return


def _is_there_still(manager: Any, lease: Mapping[str, Any] | None) -> bool:
    """Return whether that very lease is there."""
    now = None if lease is None else manager.status_of(lease["task_id"])
    return lease is not None and now is not None and now.get("fencing_token") == lease["fencing_token"]


def _show_job(target: Target, name: str, *, as_json: bool) -> None:
    """Print the state of the lease or pending request of that name, or how its job ended."""
    try:
        entry, result = _entry_or_result(target.manager, name)
    except UnknownTaskError as error:
        if name not in {server["server_name"] for server in target.manager.servers()}:
            raise
        shows = f"gpu-manager status --wide shows it, gpu-manager leases --server {name} its leases"
        raise Failure(f"{name} is a server: {shows}", REFUSED) from error
    if as_json:
        print_json(entry if entry is not None else {"task_id": name, **(result or {})})
        return
    if entry is None:
        assert result is not None
        click.echo(one_line(f"{name} {_end_in_words(result)}"))
        return
    if entry["state"] != "WAITING":
        click.echo(tables.lease_line(entry))
        since = duration(time.time() - entry["granted_at"])
        why = f": {entry['reason']}" if entry["reason"] else ""
        idle = "; ".join(_without_job(target.manager, entry))
        click.echo(one_line("; ".join(filter(None, (f"{entry['state']} for {since}{why}", idle)))))
        return
    click.echo(one_line(f"{name_in_words(entry)} waits at position {entry['position']}: {entry['reason']}"))
    if (result := target.manager.result_of(entry["task_id"])) is not None:
        click.echo(one_line(f"before that, it {_end_in_words(result)}"))


def _without_job(manager: Any, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the members of a lease whose jobs are not known to run, as their agents told last, and why."""
    from resource_manager.jobs.gang_job import MAX_AT_ONCE
    from resource_manager.jobs.running_job import RunningJob

    planned = RunningJob.planned(entry, AGENT, None) if _will_be_placed(entry) else ()
    jobs = [job for job in RunningJob.all_of(entry) or planned if job.place.launcher == AGENT]
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        states = list(pool.map(manager.agent_state, (job.server for job in jobs)))
    for job, state in zip(jobs, states, strict=True):
        run = state["runs"].get(job.key, {"state": "absent"})
        where = f"rank {job.rank} on {job.server}" if entry["nodes"] > 1 else job.server
        if state["is_silent"]:
            yield f"{where}: its agent is silent"
        elif run["state"] in ("absent", "finished"):
            yield f"{where}: its job has {'not begun' if run['state'] == 'absent' else 'ended'}"


def _entry_or_result(manager: Any, name: str) -> tuple[Mapping[str, Any] | None, JobResult | None]:
    """Return the lease or pending request of that name, or else the result of the lease of that id."""
    try:
        return entry_of(manager, name), None
    except UnknownTaskError:
        result = manager.result_of(name)
        if result is None:
            raise
        return None, result


def _will_be_placed(entry: Mapping[str, Any]) -> bool:
    from resource_manager.core.models import has_stored_job

    return has_stored_job(entry["labels"])


def _end_in_words(result: JobResult) -> str:
    """Return `ended at 14:03 with exit code 4 (FAILED): last line`."""
    if result["outcome"] == "NOT_STARTED":
        return f"did not start: {result['reason']}"
    code = result["exit_code"]
    how = "without an exit code" if code is None else f"with exit code {code}"
    at = "" if result["ended_at"] is None else f" at {clock_time(result['ended_at'])}"
    why = " ".join(filter(None, (result["reason"], result["last_line"])))
    return f"ended{at} {how} ({result['outcome']})" + (f": {why}" if why else "")


@contextmanager
def _reading(
    manager: Any, name: str, entry: Mapping[str, Any] | None, result: JobResult | None, rank: int | None
) -> Iterator[Read]:
    """Yield what reads a job's output from a byte on: by the agent of its server, or else its launcher."""
    from resource_manager.jobs.launchers import LauncherUnreachableError
    from resource_manager.jobs.running_job import RunningJob
    from resource_manager.manager.agent_jobs import AgentSilentError

    jobs: dict[int, RunningJob] = {}
    if entry is None:
        assert result is not None
        places = {number: (job["server"], job["key"]) for number, job in enumerate(result["jobs"])}
        why = "only an agent keeps the output of one that is over"
        lease_id = name
    else:
        jobs = {job.rank: job for job in RunningJob.all_of(entry)}
        places = {number: (job.server, job.key) for number, job in jobs.items()}
        why = "none was placed yet, or its process took the lease by itself"
        lease_id = entry["task_id"]
    if not places:
        raise Failure(f"{name if entry is None else name_in_words(entry)} has no job: {why}", REFUSED)
    if rank is None:
        rank, *others = places
        if others:
            say(f"the output of rank {rank}, on {places[rank][0]}; of others: --rank {ranges(others)}")
    if rank not in places:
        raise Failure(f"--rank must be one of {ranges(places)}, got {rank}", BAD_INPUT)
    server, key = places[rank]
    try:
        if jobs and jobs[rank].place.launcher != AGENT:
            with closing(jobs[rank].open()) as launcher:
                yield partial(_by_launcher, launcher, key)
        else:
            yield partial(_by_agent, manager, server, key, lease_id)
    except (LauncherUnreachableError, AgentSilentError) as error:  # through a service it is one that is down
        raise Failure(str(error), UNREACHABLE) from error


def _by_launcher(launcher: Launcher, key: str, offset: int) -> Part:
    text, after, status, _ = launcher.logs(key, offset)
    return Part(text, after, status.state)


def _by_agent(manager: Any, server: str, key: str, lease_id: str, offset: int) -> Part:
    found = manager.job_output(server, key, offset, lease_id=lease_id)
    if "error" in found:
        raise Failure(f"the output of {lease_id} cannot be read: {found['error']}", REFUSED)
    return Part(found["text"], found["offset"], found["status"]["state"])
