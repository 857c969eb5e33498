"""GPUs by hand: run a command on them in this terminal, open a shell, hold them for a time, end a job."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import click

from resource_manager.cli import completing
from resource_manager.cli.base import (
    BAD_INPUT,
    DAY_S,
    REFUSED,
    UNREACHABLE,
    Duration,
    Failure,
    one_line,
    print_json,
)
from resource_manager.cli.demand_options import DemandCommand, demand_of, owned
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import main, on_target
from resource_manager.cli.reconciling import AirflowLogin, airflow_options
from resource_manager.cli.session import Session, say
from resource_manager.cli.signals import interruptible
from resource_manager.cli.target import Target, exit_codes
from resource_manager.cli.waiting import hold_once_granted, wait_for_grant
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError, is_outage
from resource_manager.manager.answer_words import duration, name_in_words

if TYPE_CHECKING:
    from resource_manager.jobs.launchers import Job
    from resource_manager.jobs.reconcile import Action
    from resource_manager.jobs.task_identity import TaskIdentity

LOOK_AGAIN_S = 5.0
"""Time after which a commit that was on its way when nothing was found has arrived."""

LOGIN_SHELL = ("/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}" -i')

time_option = click.option(
    "--time", "time_s", type=Duration(), help="Expected runtime, and the hard end: 90, 30min, 2h, 1d."
)


class UnknownTaskError(Failure):
    """A task that neither holds a lease nor waits for one."""


class ByHandCommand(DemandCommand):
    """Command for one server, which says the lease's id, TTL and runtime itself."""

    omitted = DemandCommand.omitted | {
        *("ttl", "expected_runtime", "quarantine", "utility", "target", "sensitivity"),
        *("nodes", "spread", "same", "prefer_same", "preempt_grace", "preempt_signal"),
        *("on_idle", "requeue_after"),
    }
    defaults: ClassVar[Mapping[str, Any]] = {"gpus": 1}


@main.command(
    cls=ByHandCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@time_option
@click.option(
    "--sync",
    "folder",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Begin in a copy of DIR on the server: what .gitignore leaves, at most 100 MB, only what changed.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
@exit_codes
def run(
    target: Target, /, command: tuple[str, ...], time_s: float | None, folder: Path | None, **options: Any
) -> NoReturn:
    """Run a command on GPUs in this terminal: wait for them, run it on their server, free them at its end.

    Its exit code is the command's; 74 if a GPU failed, 75 if it was preempted, 124 if its time was over.
    Ctrl-C, SIGTERM and a closed terminal end it and free the GPUs.
    """
    if command[0].startswith("-"):  # options of the command itself follow it, so this is one of ours
        context = click.get_current_context()
        near = cast("ByHandCommand", context.command).alike(context, command[0].partition("=")[0])
        hint = f"did you mean {near[0]}?" if near else "the command comes after all options."
        raise click.UsageError(f"no such option {command[0]}: {hint}")
    if folder is not None:
        from resource_manager.cli.syncing import check_folder

        check_folder(folder)  # before it waits for GPUs
    _run(target, command, time_s, options, folder, by_agent=True)


@main.command(cls=ByHandCommand)
@time_option
@click.pass_obj
@exit_codes
def shell(target: Target, /, time_s: float | None, **options: Any) -> NoReturn:
    """Open a shell on a server with GPUs of its own; they are freed when it ends."""
    _run(target, LOGIN_SHELL, time_s, options)


@main.command(cls=ByHandCommand)
@click.option(
    "--for", "for_s", type=Duration(), required=True, help="Time until they are free again: 30min, 2h, 1d."
)
@on_target
def hold(target: Target, /, for_s: float, as_json: bool, **options: Any) -> None:
    """Take GPUs for a time, without a job; `gpu-manager release` ends it earlier.

    They are free again after that time, whatever uses them by then.
    """
    target.require_lasting_store()
    demand = demand_of(_lease_id(), {**owned(target, options), "ttl": for_s, "expected_runtime": for_s})

    def tell(lease: Mapping[str, Any]) -> None:
        if as_json:
            print_json(lease)
            return
        click.echo(tables.lease_line(lease))
        until = clock_time(lease["expires_at"])
        click.echo(f"held until {until}; gpu-manager release {lease['short_id']}", err=True)

    hold_once_granted(target, demand, tell)


@main.command()
@click.argument("name", shell_complete=completing.leases)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
@exit_codes
def attach(target: Target, name: str, command: tuple[str, ...]) -> NoReturn:
    """Open a shell, or run a command, beside a running job: on its server, with its GPUs.

    It takes no GPUs of its own and ends when the lease does.
    """
    from resource_manager.cli.attended import Attended  # loads pydantic

    with Session(target) as session:
        lease = session.ask(lambda manager: entry_of(manager, name))
        refuse_waiting(lease)
        session.ask(lambda manager: manager.require_owner(lease))
        job = _job(lease, command or LOGIN_SHELL, key=f"attach-{secrets.token_hex(4)}")
        raise SystemExit(Attended(session, lease, job, None, owns=False).run())


@main.command()
@click.argument("name", shell_complete=completing.tasks)
@click.option(
    "--retry-for",
    "retry_for_s",
    type=Duration(),
    help="Try again for so long while the store or the job's server is silent; look twice for the task.",
)
@click.option(
    "--end-task", is_flag=True, help="End its Airflow task first, by --airflow-url: it is not tried again."
)
@airflow_options(required=False)
@on_target
def stop(
    target: Target, name: str, retry_for_s: float | None, end_task: bool, airflow: AirflowLogin, as_json: bool
) -> None:
    """Stop a lease's job, then release the lease; or take a pending request out of the queue.

    Airflow tries the task again if it has tries left, unless --end-task ends it, too.
    """
    end = _Ending(target, name, airflow if end_task else None)
    done = interruptible(end if retry_for_s is None else partial(_at_last, end, retry_for_s))
    if as_json:
        print_json({"task_id": done.task_id, "action": done.action, "detail": done.detail})
    elif not done.problem:
        click.echo(one_line(f"{done.name}: {done.action}, {done.detail}"))
    if done.problem:
        raise Failure(done.problem, REFUSED)


class _Ending:
    """End of what has a name when it is first seen, in as many tries as it takes.

    Who gets that name afterwards is another one. Its task ends first, by the login of that Airflow, if any.
    """

    def __init__(self, target: Target, name: str, airflow: AirflowLogin | None) -> None:
        self._target, self._name, self._airflow = target, name, airflow
        self._seen: Mapping[str, Any] | None = None
        self._has_ended_task = False

    def __call__(self) -> Action:
        """Try once; raises `UnknownTaskError` if nothing has ever had the name."""
        from resource_manager.jobs import reconcile

        kinds = reconcile.ActionKind
        entry = self._entry()
        if entry is None:
            assert self._seen is not None
            gone = name_in_words(self._seen)
            return reconcile.Action(self._seen["task_id"], gone, kinds.GONE_BEFORE, "it has ended meanwhile")
        self._seen = entry
        identity = reconcile.task_of(entry)
        if self._airflow is not None and not self._has_ended_task:
            _end_task(self._target, entry, identity, self._airflow)
            self._has_ended_task = True  # a later try of that task is none of this lease's
        done = reconcile.end(self._target.manager, entry)
        if self._airflow is None and identity is not None and done.action is not kinds.KEPT:
            say("Airflow may try its task again: stop --end-task ends that, too")
        if self._airflow is not None and done.action is kinds.GONE_BEFORE:
            return replace(done, action=kinds.RELEASED, detail="by its task, which was ended in Airflow")
        return done

    def _entry(self) -> Mapping[str, Any] | None:
        """Return what is to end, as it is now; None if it is gone."""
        manager, seen = self._target.manager, self._seen
        if seen is None:
            return entry_of(manager, self._name)
        if seen["state"] == "WAITING":
            found = manager.status_of(seen["task_id"])
            return found if found is not None and found["short_id"] == seen["short_id"] else None
        try:
            return manager.named(seen["task_id"], pending=False, fencing_token=seen["fencing_token"])
        except LeaseNotFoundError:
            return None


def _end_task(
    target: Target, entry: Mapping[str, Any], identity: TaskIdentity | None, airflow: AirflowLogin
) -> None:
    """End the task of a lease or pending request in Airflow; raises `Failure` before anything is stopped."""
    from resource_manager.jobs.airflow_api import AirflowUnavailableError

    if identity is None:
        raise Failure(f"{name_in_words(entry)} is no single task of Airflow: leave out --end-task", BAD_INPUT)
    if not airflow.is_complete:
        missing = ("" if airflow.url else "--airflow-url, ") + "--airflow-user and --airflow-password"
        raise Failure(
            f"--end-task asks Airflow: set {missing}, or --airflow-token; or mark the task as failed in "
            "Airflow; nothing was stopped",
            BAD_INPUT,
        )
    target.manager.require_owner(entry)
    instance = (target.configured() if target.url else target.settings()).instance
    try:
        airflow.states().end_task(identity, instance)
    except AirflowUnavailableError as error:
        raise Failure(f"{error}; nothing was stopped", UNREACHABLE) from error


def _at_last(end: Callable[[], Action], retry_for_s: float) -> Action:
    """Return what `end` did once store and server answered; a task not found is looked for once more."""
    from resource_manager.jobs.reconcile import ActionKind

    half_done = (ActionKind.KEPT, ActionKind.PARTLY_RELEASED)
    deadline, was_missing = time.monotonic() + retry_for_s, False
    while True:
        is_last = time.monotonic() + LOOK_AGAIN_S > deadline
        try:
            done = end()
            if is_last or done.action not in half_done:
                return done
            was_missing = False
        except UnknownTaskError:
            if is_last or was_missing:
                raise
            was_missing = True
        except ResourceManagerError as error:
            if is_last or not is_outage(error):
                raise
            was_missing = False
        time.sleep(LOOK_AGAIN_S)


def _run(
    target: Target,
    command: Sequence[str],
    time_s: float | None,
    options: dict[str, Any],
    folder: Path | None = None,
    *,
    by_agent: bool = False,
) -> NoReturn:
    target.require_lasting_store()
    from resource_manager.cli.attended import TTL_S, Attended  # loads pydantic

    labels = [*options.get("labels", ()), "launcher=terminal", f"host={socket.gethostname()}"]
    given = {**owned(target, options), "labels": tuple(labels), "ttl": TTL_S}
    if time_s is not None:
        given["expected_runtime"] = time_s
    demand = demand_of(_lease_id(), given)
    with Session(target) as session:
        lease = wait_for_grant(session, demand)
        say(tables.lease_line(lease) + (f", for {duration(time_s)}" if time_s else ""))
        job = _job(lease, command)
        raise SystemExit(Attended(session, lease, job, time_s, folder=folder, by_agent=by_agent).run())


def _lease_id() -> str:
    from resource_manager.manager.commit.asking import user_name

    return f"hand:{user_name()}@{socket.gethostname()}/{secrets.token_hex(4)}"


def _job(lease: Mapping[str, Any], command: Sequence[str], key: str | None = None) -> Job:
    from resource_manager.jobs.launchers import job_key
    from resource_manager.jobs.running_job import job_of

    return job_of(lease, key or job_key(lease["task_id"], lease["fencing_token"]), command)


def refuse_waiting(entry: Mapping[str, Any]) -> None:
    """Raise `Failure` for a request that waits: it has no job yet."""
    if entry["state"] == "WAITING":
        waits = f"waits at position {entry['position']}: {entry['reason']}"
        raise Failure(f"{name_in_words(entry)} {waits}", REFUSED)


def entry_of(manager: Any, name: str) -> Mapping[str, Any]:
    """Return the lease or pending request of that name; raises `UnknownTaskError`."""
    try:
        found: Mapping[str, Any] = manager.named(name)
    except LeaseNotFoundError as error:
        raise UnknownTaskError(str(error), REFUSED) from None
    return found


def clock_time(at: float) -> str:
    """Return a time of today as 14:03, another one with its date."""
    return time.strftime("%H:%M" if at - time.time() < DAY_S else "%Y-%m-%d %H:%M", time.localtime(at))
