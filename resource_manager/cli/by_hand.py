"""GPUs by hand: run a command on them in this terminal, open a shell, hold them for a time, end a job."""

from __future__ import annotations

import getpass
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import click

from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, REFUSED, UNREACHABLE, Failure, one_line, print_json
from resource_manager.cli.commands import json_option, main
from resource_manager.cli.demand import DemandCommand, demand_of
from resource_manager.cli.target import Target, exit_codes
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.lazy import lazy_module
from resource_manager.manager.serializers import duration

if TYPE_CHECKING:
    from resource_manager.cli import tables
    from resource_manager.jobs.launchers import Job
    from resource_manager.jobs.running_job import RunningJob
else:  # loads rich
    tables = lazy_module("resource_manager.cli.tables")

TTL_S = 60.0
"""TTL of a lease that a terminal renews: its GPUs are free this long after the terminal is gone."""

RENEW_EVERY_S = 15.0
LOOK_EVERY_S = 1.0
SCHEDULE_EVERY_S = 5.0
WARN_AT = 0.9
GRACE_S = 10.0
TIMED_OUT, INTERRUPTED, TERMINATED = 124, 130, 143
"""Exit codes as `timeout` and shells have them."""

STEERING = re.compile(r"\x1b(?!\[[0-9;:]*[mK])|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Characters that would steer the terminal of a reader: all controls but colours, line ends and returns."""

DAY_S = 86_400


class Duration(click.ParamType[float]):
    """Seconds, or a number with a unit: 90, 30min, 2h, 1d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from resource_manager.manager.cluster_file.durations import seconds_of  # loads pydantic

        try:
            seconds = seconds_of(str(value))
        except ValueError as error:
            self.fail(f"a duration {error}", param, ctx)
        if not 0 < seconds <= 366 * DAY_S:
            self.fail(f"a duration must be above 0 and at most a year, got {value!r}", param, ctx)
        return seconds


time_option = click.option(
    "--time", "time_s", type=Duration(), help="Expected runtime, and the hard end: 90, 30min, 2h, 1d."
)


class ByHandCommand(DemandCommand):
    """Command for one server, which says the lease's id, TTL and runtime itself."""

    omitted = DemandCommand.omitted | {
        *("ttl", "expected_runtime", "quarantine", "utility", "target", "sensitivity"),
        *("nodes", "spread", "same", "prefer_same", "preempt_grace", "preempt_signal"),
    }
    defaults: ClassVar[Mapping[str, Any]] = {"gpus": 1}


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP came; `exit_code` is what this program ends with."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@main.command(cls=ByHandCommand, context_settings={"ignore_unknown_options": True})
@time_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
@exit_codes
def run(target: Target, /, command: tuple[str, ...], time_s: float | None, **options: Any) -> NoReturn:
    """Run a command on GPUs in this terminal: wait for them, run it on their server, free them at its end.

    Its exit code is the command's. Ctrl-C, SIGTERM and a closed terminal end it and free the GPUs.
    """
    raise SystemExit(_run(target, command, time_s, options))


@main.command(cls=ByHandCommand)
@time_option
@click.pass_obj
@exit_codes
def shell(target: Target, /, time_s: float | None, **options: Any) -> NoReturn:
    """Open a shell on a server with GPUs of its own; they are freed when it ends."""
    login_shell = ("/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}" -i')
    raise SystemExit(_run(target, login_shell, time_s, options))


@main.command(cls=ByHandCommand)
@click.option(
    "--for", "for_s", type=Duration(), required=True, help="Time until they are free again: 30min, 2h, 1d."
)
@json_option
@click.pass_obj
@exit_codes
def hold(target: Target, /, for_s: float, as_json: bool, **options: Any) -> None:
    """Take GPUs for a time, without a job; `gpu-manager release` ends it earlier."""
    manager = target.manager
    demand = demand_of(_lease_id(), {**options, "ttl": for_s, "expected_runtime": for_s})
    with _signals():
        lease = _wait_for_grant(manager, demand)
    if as_json:
        print_json(lease)
        return
    click.echo(tables.lease_line(lease))
    click.echo(f"held until {_clock(lease['expires_at'])}; gpu-manager release {lease['task_id']}", err=True)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("task_id", shell_complete=completing.leases)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
@exit_codes
def attach(target: Target, task_id: str, command: tuple[str, ...]) -> NoReturn:
    """Open a shell, or run a command, beside a running job: on its server, with its GPUs.

    It takes no GPUs of its own and ends when the lease does.
    """
    lease = _lease_of(target, task_id)
    target.manager.require_owner(lease)
    login_shell = ("/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}" -i')
    job = _job(lease, command or login_shell, key=f"attach-{secrets.token_hex(4)}")
    raise SystemExit(_attended(target, lease, job, None, owns=False))


@main.command()
@click.argument("task_id", shell_complete=completing.leases)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--rank", type=click.IntRange(0), default=0, help="Member of a gang.")
@click.pass_obj
@exit_codes
def logs(target: Target, task_id: str, follow: bool, rank: int) -> None:
    """Print the output of a lease's job."""
    from contextlib import closing

    from resource_manager.jobs.launchers import JobState

    job = _running_job(_lease_of(target, task_id), rank)
    offset = 0
    with closing(job.open()) as launcher:
        while True:
            text, after, status = launcher.logs(job.key, offset)
            click.echo(harmless(text) if sys.stdout.isatty() else text, nl=False)
            if after != offset:
                offset = after
            elif follow and status.state is JobState.RUNNING:
                time.sleep(LOOK_EVERY_S)
            else:
                return


@main.command()
@click.argument("task_id", shell_complete=completing.tasks)
@json_option
@click.pass_obj
@exit_codes
def stop(target: Target, task_id: str, as_json: bool) -> None:
    """Stop a lease's job, then release the lease; or take a pending request out of the queue."""
    from resource_manager.jobs import reconcile

    done = reconcile.end(target.manager, _entry_of(target, task_id))
    if as_json:
        print_json({"task_id": done.task_id, "action": done.action, "detail": done.detail})
    elif done.action is not reconcile.ActionKind.KEPT:
        click.echo(one_line(f"{task_id}: {done.action}, {done.detail}"))
    if done.action is reconcile.ActionKind.KEPT:
        raise Failure(f"{task_id} keeps its lease: {done.detail}", REFUSED)


def harmless(text: str) -> str:
    """Return a job's output, escaped where it would steer the terminal: its title, clipboard or answers."""
    return STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def _run(target: Target, command: Sequence[str], time_s: float | None, options: dict[str, Any]) -> int:
    labels = [*options.get("labels", ()), "launcher=terminal", f"host={socket.gethostname()}"]
    given = {**options, "labels": tuple(labels), "ttl": TTL_S}
    if time_s is not None:
        given["expected_runtime"] = time_s
    manager = target.manager
    demand = demand_of(_lease_id(), given)
    try:
        with _signals():
            lease = _wait_for_grant(manager, demand)
            _say(f"{tables.lease_line(lease)}" + (f", for {duration(time_s)}" if time_s else ""))
            return _attended(target, lease, _job(lease, command), time_s)
    except Interrupted as interrupted:
        return interrupted.exit_code


def _lease_id() -> str:
    return f"hand:{getpass.getuser()}@{socket.gethostname()}/{secrets.token_hex(4)}"


def _wait_for_grant(manager: Any, demand: Any) -> Any:
    """Return the lease once it is granted; a wait's reason is said when it changes.

    The request leaves the queue if this program is interrupted or fails.
    """
    lease_id, said, scheduled_at = demand.lease_id, "", time.monotonic()
    try:
        found = manager.submit(demand)
        while found["state"] == "WAITING":
            reason = f"waits at position {found['position']}: {found['reason']}"
            if reason != said:
                start = found.get("estimated_start")
                _say(f"{lease_id} {reason}" + (f"; expected start {tables.start(start)}" if start else ""))
                said = reason
            time.sleep(LOOK_EVERY_S)
            if time.monotonic() - scheduled_at > SCHEDULE_EVERY_S and hasattr(manager, "expire_and_schedule"):
                manager.expire_and_schedule()
                scheduled_at = time.monotonic()
            found = manager.status_of(lease_id)
            if found is None:
                raise Failure(f"{lease_id} was taken out of the queue", REFUSED)
    except BaseException:
        with suppress(ResourceManagerError):
            if not manager.cancel(lease_id):
                manager.release_resources(lease_id)
        raise
    return found


def _job(lease: Mapping[str, Any], command: Sequence[str], key: str | None = None) -> Job:
    from resource_manager.jobs.launchers import job_key
    from resource_manager.jobs.running_job import job_of

    return job_of(lease, key or job_key(lease["task_id"], lease["fencing_token"]), command)


def _attended(
    target: Target, lease: Mapping[str, Any], job: Job, time_s: float | None, *, owns: bool = True
) -> int:
    """Run the job in this terminal until it ends; return its exit code.

    With `owns` the lease is renewed meanwhile, and released once every process of the job is gone.
    """
    from contextlib import closing

    from resource_manager.core.models import JobPlace
    from resource_manager.jobs.launchers import terminal

    (member, *_) = lease["members"]
    here = terminal.is_here(member["address"], member["server_name"])
    if not here and not member["address"]:
        raise Failure(
            f"server {member['server_name']} has no address in the inventory, so no ssh can reach it",
            REFUSED,
        )
    process = None
    try:
        with closing(terminal.open_terminal(JobPlace("terminal", member["address"]), here)) as launcher:
            place = launcher.prepare(job)
        process = terminal.attend(place, job, here)
        code = _watch(target.manager, lease, process, time_s, renews=owns)
    except Interrupted as interrupted:
        code = interrupted.exit_code
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * GRACE_S)
        gone = _end(member["address"], here, job.key)
        if owns and gone is None:
            outcome = "SUCCESS" if process is not None and process.returncode == 0 else "FAILED"
            with suppress(LeaseNotFoundError):
                target.manager.release_resources(
                    lease["task_id"], fencing_token=lease["fencing_token"], outcome=outcome
                )
        elif gone is not None:
            _say(f"{gone}; the lease {lease['task_id']} ends within {TTL_S:g} s")
    if code == terminal.SSH_FAILED and not here:
        raise Failure(f"server {member['server_name']} does not answer by ssh", UNREACHABLE)
    return code


def _watch(
    manager: Any,
    lease: Mapping[str, Any],
    process: subprocess.Popen[bytes],
    time_s: float | None,
    *,
    renews: bool,
) -> int:
    """Return the exit code of the job, which ends with its lease and at the end of its time."""
    started = renewed = time.monotonic()
    warned = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_EVERY_S)
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        if time_s is not None and now - started >= WARN_AT * time_s and not warned:
            _say(f"{duration(max(started + time_s - now, 0))} left of the {duration(time_s)}")
            warned = True
        if time_s is not None and now - started >= time_s:
            _say("its time is over")
            raise Interrupted(TIMED_OUT)
        if now - renewed < RENEW_EVERY_S:
            continue
        try:
            if renews:
                manager.renew(lease["task_id"], fencing_token=lease["fencing_token"])
            elif not _is_live(manager.status_of(lease["task_id"]), lease):
                raise LeaseNotFoundError(lease["task_id"])
            renewed = now
        except LeaseNotFoundError:
            _say(f"the lease {lease['task_id']} was ended")
            raise Interrupted(TERMINATED) from None
        except ResourceManagerError as error:
            if now - renewed >= TTL_S - RENEW_EVERY_S:  # the GPUs may soon be another's
                _say(f"the lease could not be renewed: {error}")
                raise Interrupted(TERMINATED) from None


def _is_live(found: Mapping[str, Any] | None, lease: Mapping[str, Any]) -> bool:
    """Return True if this is the lease still, and neither its request that waits again nor another grant."""
    return found is not None and found.get("fencing_token") == lease["fencing_token"]


def _end(address: str, here: bool, key: str) -> str | None:
    """End what is left of the job; return None once it is known to be gone, else the reason."""
    from contextlib import closing

    from resource_manager.core.models import JobPlace
    from resource_manager.jobs.launchers import LauncherError
    from resource_manager.jobs.launchers.terminal import open_terminal

    try:
        with closing(open_terminal(JobPlace("terminal", address), here)) as launcher:
            launcher.stop(key, GRACE_S)
    except LauncherError as error:
        return f"the job may still run: {error}"
    return None


def _running_job(lease: Mapping[str, Any], rank: int) -> RunningJob:
    from resource_manager.jobs.running_job import RunningJob

    jobs = RunningJob.all_of(lease)
    if not jobs:
        raise Failure(f"{lease['task_id']} has no job: its process took the lease by itself", REFUSED)
    if rank >= len(jobs):
        raise Failure(f"--rank must be below {len(jobs)}, got {rank}", BAD_INPUT)
    return jobs[rank]


def _lease_of(target: Target, task_id: str) -> Mapping[str, Any]:
    found = _entry_of(target, task_id)
    if found["state"] == "WAITING":
        raise Failure(f"{task_id} waits at position {found['position']}: {found['reason']}", REFUSED)
    return found


def _entry_of(target: Target, task_id: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = target.manager.status_of(task_id)
    if found is None:
        raise Failure(f"{task_id!r} holds no lease and waits for none; see gpu-manager status", REFUSED)
    return found


@contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `Interrupted`, the first of them only."""
    codes = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED, signal.SIGHUP: 128 + signal.SIGHUP}

    def interrupt(number: int, frame: Any) -> None:
        for each in codes:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(codes[signal.Signals(number)])

    before: dict[signal.Signals, Callable[[int, Any], Any] | int | None] = {}
    for number in codes:
        before[number] = signal.signal(number, interrupt)
    tty_output = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the job has the terminal
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGTTOU, tty_output)


def _clock(at: float) -> str:
    return time.strftime("%H:%M" if at - time.time() < DAY_S else "%Y-%m-%d %H:%M", time.localtime(at))


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal is gone
        click.echo("\n".join(map(one_line, f"gpu-manager: {line}".splitlines())), err=True)
