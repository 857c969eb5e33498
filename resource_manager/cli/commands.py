"""Commands that read and change the state."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from resource_manager import STORED_FORMAT, __version__
from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, INTERVAL, REFUSED, Failure, OneLineErrors, print_json
from resource_manager.cli.demand_options import DemandCommand, demand_of, owned
from resource_manager.cli.target import Target, exit_codes
from resource_manager.cli.waiting import hold_once_granted
from resource_manager.core.changes import JobEnd, ReleaseResult
from resource_manager.errors import LockTimeoutError
from resource_manager.jobs.task_identity import probe_id
from resource_manager.lazy import lazy_module
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.plurals import counted, numbered_gpus
from resource_manager.manager.wording import What, matches, what_of

if TYPE_CHECKING:
    from resource_manager.cli import cluster_tables, tables
    from resource_manager.manager.results import Allocation, QueueEntry
else:  # loads rich, which no command with --json needs
    cluster_tables = lazy_module("resource_manager.cli.cluster_tables")
    tables = lazy_module("resource_manager.cli.tables")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

PROGRAM = "gpu-manager"

_SILENCE = logging.NullHandler()


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", envvar="GPU_MANAGER_URL", help="URL of the service; without it, the store is used.")
@click.option("--token", envvar="GPU_MANAGER_TOKEN", help="Bearer token for the service.")
@click.option("--store", help="Store (redis://…, airflow://, memory://); overrides GPU_MANAGER_STORE.")
@click.version_option(message=f"{PROGRAM} {__version__}, stored format {STORED_FORMAT}", version=__version__)
@click.pass_context
def main(context: click.Context, /, **given: Any) -> None:
    """Show, request and release leases on named GPUs and CPUs.

    Exit codes: 0 done, 1 refused or not found, 2 bad input, 3 service or store unreachable.
    """
    # A command's own line says what its caller must know, also where a job's launcher loads Airflow, which
    # prints all logs; `serve` sets up a log of its own.
    package = logging.getLogger("resource_manager")
    package.addHandler(_SILENCE)
    package.propagate = False
    context.call_on_close(lambda: setattr(package, "propagate", True))
    # The client of a service says there why a call takes longer.
    logging.getLogger("resource_manager.rest.connection").addHandler(logging.lastResort or _SILENCE)
    context.obj = Target.of(given)
    context.call_on_close(context.obj.close)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON only.")(command)


def wide_option(command: F) -> F:
    return click.option("--wide", is_flag=True, help="Print every column, however wide the terminal is.")(
        command
    )


mine_option = click.option("--mine", is_flag=True, help="Only yours: of the token's holder, or your user.")


@main.command()
@mine_option
@click.option("--server", shell_complete=completing.servers, help="Only those on this server: name or id.")
@wide_option
@json_option
@click.pass_obj
@exit_codes
def leases(target: Target, mine: bool, server: str | None, wide: bool, as_json: bool) -> None:
    """Show the leases, the oldest first, and the jobs on Slurm, which have no lease."""
    found = _own(target, target.manager.leases(), mine)
    on_slurm = [
        job
        for job in _own(target, target.manager.slurm_jobs(), mine)
        if job["ended_at"] is None and not server
    ]
    if server:
        name = target.manager.server(server_of(server))["server_name"]
        found = [each for each in found if any(member["server_name"] == name for member in each["members"])]
    if as_json:
        print_json([*found, *on_slurm])
        return
    console = tables.console(wide=wide)
    console.print(tables.leases_table(found, time.time()))
    if on_slurm:
        console.print(cluster_tables.slurm_table(on_slurm, time.time()))


@main.command()
@mine_option
@click.option("--coming", is_flag=True, help="Instead what tasks of running DAGs will ask for, and when.")
@wide_option
@json_option
@click.pass_obj
@exit_codes
def queue(target: Target, mine: bool, coming: bool, wide: bool, as_json: bool) -> None:
    """Show the pending requests in queue order."""
    rows: list[Any] = [*(target.manager.coming() if coming else target.manager.queue())]
    found = _own(target, rows, mine)
    if as_json:
        print_json(found)
    else:
        table = tables.coming_table if coming else tables.queue_table
        tables.console(wide=wide).print(table(found))


def _own(target: Target, entries: list[T], mine: bool) -> list[T]:
    """Return what belongs to this caller if only that is asked for."""
    if not mine:
        return entries
    name = target.manager.caller_name()
    return [each for each in entries if cast("Mapping[str, Any]", each)["owner"] == name]


@main.command(cls=DemandCommand)
@click.argument("lease_id", metavar="TASK_ID")
@click.option("--wait", is_flag=True, help="Queue for them, and wait; Ctrl-C gives the place up.")
@json_option
@click.pass_obj
@exit_codes
def allocate(target: Target, /, lease_id: str, wait: bool, as_json: bool, **options: Any) -> None:
    """Grant GPUs now, or print why not and exit with 1; with --wait, once they are free."""

    def tell(lease: Any) -> None:
        print_json(lease) if as_json else click.echo(tables.lease_line(lease))

    if wait:
        hold_once_granted(target, demand_of(lease_id, owned(target, options)), tell)
        return
    from resource_manager.core.refusal import RefusalKind  # which the manager and the client load anyway
    from resource_manager.manager.refusal_wording import Refusal

    lease = target.manager.try_allocate(demand_of(lease_id, owned(target, options)))
    if isinstance(lease, Refusal):
        waits = "" if lease.kind is RefusalKind.NEVER_FITS else " (--wait queues for them)"
        raise Failure(f"not granted: {lease.detail}{waits}", REFUSED)
    tell(lease)


@main.command(cls=DemandCommand)
@click.option(
    "-e", "--env", "environment", multiple=True, metavar="NAME[=VALUE]", help="Variable of the command."
)
@click.argument("lease_id", metavar="TASK_ID")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@json_option
@click.pass_obj
@exit_codes
def submit(
    target: Target,
    /,
    lease_id: str,
    command: tuple[str, ...],
    environment: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Grant GPUs, or queue for them; with a command after --, have the agent of their server run it there."""
    job = None
    if command:
        job = {"command": list(command), "env": dict(map(_variable, environment)), "launcher": "agent"}
    elif environment:
        raise Failure("--env is of a command: give one after --", BAD_INPUT)
    view = target.manager.submit(demand_of(lease_id, owned(target, options)), job=job)
    if as_json:
        print_json(view)
    elif view["state"] == "WAITING":
        click.echo(f"{name_in_words(view)}: waits at position {view['position']}: {view['reason']}")
    else:
        click.echo(tables.lease_line(view))


def _variable(given: str) -> tuple[str, str]:
    """Return a variable and its value: that of this process if none is given."""
    name, equals, value = given.partition("=")
    if not name.isidentifier():
        raise Failure(f"--env takes NAME=VALUE or NAME, got {given[:60]!r}", BAD_INPUT)
    if not equals and name not in os.environ:
        raise Failure(f"--env {name}: there is no such variable here, give {name}=VALUE", BAD_INPUT)
    return name, value if equals else os.environ[name]


@main.command()
@click.argument("name", shell_complete=completing.leases)
@click.option("--fencing-token", type=int, help="Fail unless the lease has this fencing token.")
@click.option("--outcome", default="", help="Outcome for the history: SUCCESS, FAILED, CANCELLED or any.")
@click.option(
    "--rank", "ranks", type=int, multiple=True, help="End only this member of a gang; quarantine the others."
)
@click.option(
    "--force", is_flag=True, help="Quarantine a lease whose job may run: nobody renews it any more."
)
@click.option("--gone", is_flag=True, help="Free the GPUs: you know that its job is gone. Operators only.")
@click.option("--reason", default="", help="How it is known that the job is gone, for the history.")
@json_option
@click.pass_obj
@exit_codes
def release(
    target: Target,
    name: str,
    fencing_token: int | None,
    outcome: str,
    ranks: tuple[int, ...],
    force: bool,
    gone: bool,
    reason: str,
    as_json: bool,
) -> None:
    """End a lease, or members of a gang; one with a job is ended by `stop`, which ends the job first."""
    if force and (gone or ranks):
        raise Failure(
            "--force is for a whole lease of whose job nothing is known: not with --gone or --rank", BAD_INPUT
        )
    if gone and not reason.strip():
        raise Failure("--gone needs --reason: how it is known that nothing runs there any more", BAD_INPUT)
    job_end = JobEnd.FORCED if force else JobEnd.GONE if gone else JobEnd.UNKNOWN
    if ranks and fencing_token is None:
        raise Failure("--rank needs --fencing-token: the lease whose members end", BAD_INPUT)
    lease = _lease_named(target, name, fencing_token)
    lease_id, token = lease["task_id"], lease["fencing_token"]
    if ranks:
        result = target.manager.release_members(
            lease_id, ranks, fencing_token=token, outcome=outcome, job_end=job_end
        )
    else:
        result = target.manager.release(
            lease_id, fencing_token=token, outcome=outcome, job_end=job_end, reason=reason
        )
    done = result in (ReleaseResult.RELEASED, ReleaseResult.QUARANTINED)
    _done(done, as_json, lease, str(result), "has ended meanwhile")


def _lease_named(target: Target, name: str, fencing_token: int | None = None) -> Allocation:
    return cast("Allocation", target.manager.named(name, pending=False, fencing_token=fencing_token))


@main.command()
@click.argument("name", shell_complete=completing.leases)
@click.option("--fencing-token", type=int, help="Fail unless the lease has this fencing token.")
@click.option("--for", "for_s", type=INTERVAL, help="Life from now, if longer than its TTL: 10min, 2h.")
@json_option
@click.pass_obj
@exit_codes
def renew(target: Target, name: str, fencing_token: int | None, for_s: float | None, as_json: bool) -> None:
    """Renew a lease: its TTL starts again from now."""
    lease = _lease_named(target, name, fencing_token)
    lease = target.manager.renew(lease["task_id"], fencing_token=lease["fencing_token"], for_s=for_s)
    print_json(lease) if as_json else click.echo(tables.lease_line(lease))


@main.command()
@click.argument("name", shell_complete=completing.leases)
@click.option(
    "--for",
    "preemptor",
    shell_complete=completing.pending,
    default="",
    help="Pending request that gets what it held; default: the first that waits for it.",
)
@click.option("--dry-run", is_flag=True, help="Show for whom it would be taken; change nothing.")
@json_option
@click.pass_obj
@exit_codes
def preempt(target: Target, name: str, preemptor: str, dry_run: bool, as_json: bool) -> None:
    """Take a lease for a pending request: its job saves what it did, then waits again."""
    lease = _lease_named(target, name)
    for_id = target.manager.named(preemptor, pending=True)["task_id"] if preemptor else ""
    taken = target.manager.preempt(
        lease["task_id"], preemptor=for_id, fencing_token=lease["fencing_token"], dry_run=dry_run
    )
    unchanged = " (--dry-run: not changed)" if dry_run else ""
    line = f"{name_in_words(taken)} is {taken['reason']}{unchanged}"
    print_json(taken) if as_json else click.echo(line)


@main.command()
@click.argument("name", shell_complete=completing.pending)
@click.option("--reason", default="", help="Reason for the history.")
@json_option
@click.pass_obj
@exit_codes
def cancel(target: Target, name: str, reason: str, as_json: bool) -> None:
    """Remove a pending request from the queue."""
    entry = cast("QueueEntry", target.manager.named(name, pending=True))
    done = target.manager.cancel(entry["task_id"], sequence=entry["sequence"], reason=reason)
    _done(done, as_json, entry, "cancelled", "has left the queue meanwhile")


gpu_option = click.option("--gpu", help="One GPU of the server, by number or UUID.")


@main.command()
@click.argument("server", shell_complete=completing.servers)
@gpu_option
@click.option("--reason", default="", help="Reason, shown to every user.")
@click.option("--failed", is_flag=True, help="Mark the server as broken, not only closed.")
@json_option
@click.pass_obj
@exit_codes
def drain(target: Target, server: str, gpu: str | None, reason: str, failed: bool, as_json: bool) -> None:
    """Grant no new leases on a server (id or name) or one of its GPUs; its current leases continue."""
    view = target.manager.drain(server_of(server), gpu, reason=reason, failed=failed)
    if as_json:
        print_json(view)
    elif gpu is None:
        click.echo(f"{view['server_name']}: drained, {view['running_tasks']} still running")
    else:
        click.echo(f"{view['server_name']}: GPU {gpu} drained")


@main.command()
@click.argument("server", shell_complete=completing.servers)
@gpu_option
@json_option
@click.pass_obj
@exit_codes
def resume(target: Target, server: str, gpu: str | None, as_json: bool) -> None:
    """Allow new leases on a drained server (id or name), or on one closed GPU of it, again."""
    view = target.manager.resume(server_of(server), gpu)
    if as_json:
        print_json(view)
        return
    closed = [each["gpu_id"] for each in view["gpus_closed"]]
    rest = f"; still closed: {numbered_gpus(closed)}" if closed else ""
    where = "takes" if gpu is None else f"GPU {gpu} takes"
    click.echo(f"{view['server_name']}: {where} leases again{rest}")


@main.command()
@click.option("--after", type=click.IntRange(0, 2**53), help="The first changes after this version.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--all", "renewals", is_flag=True, help="Show renewals of leases, too.")
@click.option("--by", default="", help="Only what this caller asked for; * stands for any text.")
@click.option("--what", type=click.Choice([str(what) for what in What]), help="Only changes that do this.")
@wide_option
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the whole kept history into this file, for gpu-simulate replay --history.",
)
@click.option(
    "--archive",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Like --export, but append only the changes that the file does not have yet.",
)
@json_option
@click.pass_obj
@exit_codes
def history(
    target: Target,
    after: int | None,
    limit: int,
    renewals: bool,
    by: str,
    what: str | None,
    wide: bool,
    export: Path | None,
    archive: Path | None,
    as_json: bool,
) -> None:
    """Show the newest changes in the kept history, the newest last, without renewals."""
    if export is not None and archive is not None:
        raise Failure("--export and --archive exclude each other", BAD_INPUT)
    if archive is not None:
        from resource_manager.storage.archive import extend

        changes = extend(archive, target.manager)
        print_json({"file": str(archive), "changes": changes}) if as_json else click.echo(
            f"{archive}: {counted(changes, 'new change')}"
        )
        return
    if export is not None:
        from resource_manager.storage.history_file import collect, write_file

        recorded = collect(target.manager)
        write_file(recorded, export)
        written = {"file": str(export), "changes": len(recorded.changes), "forgotten": recorded.forgotten}
        print_json(written) if as_json else click.echo(
            f"{export}: {counted(len(recorded.changes), 'change')}"
        )
        return

    wanted = what_of(what or "")

    def is_shown(change: Mapping[str, Any]) -> bool:
        shows_kind = renewals or what is not None or change["change"] != "renewed"
        return shows_kind and matches(change, by, wanted)

    entries = _changes(target.manager, after, limit, is_shown)
    if as_json:
        print_json(entries)
    else:
        names = _names(target.manager, entries)
        tables.console(wide=wide).print(tables.history_table(entries, names))


def _changes(
    manager: Any, after: int | None, limit: int, is_shown: Callable[[Mapping[str, Any]], bool]
) -> list[Any]:
    """Return the first changes shown after a version, or the newest ones, in order."""
    from resource_manager.manager.newest_changes import newest_changes

    found: list[Any] = []
    if after is not None:
        while len(found) < limit and (page := manager.history(after=after, limit=1000)):
            found += filter(is_shown, page)
            after = page[-1]["version"]
        return found[:limit]
    changes = newest_changes(manager.history, manager.summary()["version"])
    return list(islice(filter(is_shown, changes), limit))[::-1]


def _names(manager: Any, shown: list[Any]) -> dict[int, dict[str, str]]:
    """Return by version the names of the leases that the changes shown, in order, mention."""
    from resource_manager.manager.newest_changes import MAX_LOOKED_AT, names_at, newest_changes

    newest = shown[-1]["version"] if shown else 0
    return names_at(shown, islice(newest_changes(manager.history, newest), MAX_LOOKED_AT))


@main.command(cls=DemandCommand)
@click.argument("name", required=False, shell_complete=completing.tasks)
@wide_option
@json_option
@click.pass_obj
@exit_codes
def explain(target: Target, /, name: str | None, wide: bool, as_json: bool, **options: Any) -> None:
    """Show whether a request would be granted now, where, or why not; exit with 1 if not.

    NAME is that of a pending request or a lease; without it the options say what is asked for.
    """
    if name is not None:
        _reject_demand(options)
        answer = target.manager.explain_named(name)
    else:
        answer = target.manager.explain(demand_of(probe_id(), options))
    print_json(answer) if as_json else tables.console(wide=wide).print(tables.explanation(answer))
    if not answer["would_be_granted"]:
        raise SystemExit(REFUSED)


def _reject_demand(options: Mapping[str, Any]) -> None:
    """Raise `Failure` for an option that says what is asked for, where a request that is made has a name."""
    context = click.get_current_context()
    params = context.command.get_params(context)
    given = [
        param.opts[0]
        for param in params
        if param.name in options and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise Failure(f"NAME and {given[0]}: say either a name or what is asked for", BAD_INPUT)


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.pass_obj
@exit_codes
def reset(target: Target, yes: bool, as_json: bool) -> None:
    """End all leases and empty the queue. Dangerous while jobs run."""
    if not yes:
        if as_json:
            raise Failure("--json cannot ask for confirmation: add --yes", BAD_INPUT)
        click.confirm("End every lease and empty the queue?", abort=True, err=True)
    try:
        target.manager.reset()
    except LockTimeoutError as error:
        raise Failure("the lock was not free: try again", REFUSED) from error
    print_json({"success": True}) if as_json else click.echo("reset")


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell, used as: eval "$(gpu-manager completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None
    script = found(main, {}, PROGRAM, "_GPU_MANAGER_COMPLETE").source()
    click.echo(completing.COLONS + script if shell == "bash" else script)


def server_of(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _done(done: bool, as_json: bool, entry: Mapping[str, Any], verb: str, otherwise: str) -> None:
    if not done:
        raise Failure(f"{name_in_words(entry)} {otherwise}", REFUSED)
    if as_json:
        print_json({"success": True, "task_id": entry["task_id"]})
    else:
        click.echo(f"{name_in_words(entry)}: {verb}")
