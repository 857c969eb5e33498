"""Commands about leases and pending requests: show, ask for, end and explain them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource
from click.exceptions import Exit

from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, INTERVAL, REFUSED, Failure, print_json
from resource_manager.cli.demand_options import DemandCommand, demand_of, owned
from resource_manager.cli.lazy_tables import cluster_tables, tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.target import Target
from resource_manager.cli.waiting import hold_once_granted
from resource_manager.core.changes import JobEnd
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.results import ReleaseResult

if TYPE_CHECKING:
    from resource_manager.manager.results import Allocation, QueueEntry


T = TypeVar("T")

mine_option = click.option("--mine", is_flag=True, help="Only yours: of the token's holder, or your user.")


@main.command()
@click.argument("name", required=False, metavar="")
@mine_option
@click.option("--server", shell_complete=completing.servers, help="Only those on this server: name or id.")
@wide_option
@on_target
def leases(
    target: Target, name: str | None, mine: bool, server: str | None, wide: bool, as_json: bool
) -> None:
    """Show the leases, the oldest first, and the jobs on Slurm, which have no lease."""
    if name is not None:
        shows = f"--server {name} shows those on a server, gpu-manager status {name} one lease"
        raise Failure(f"gpu-manager leases takes no name: {shows}", BAD_INPUT)
    found = _own(target, target.manager.leases(), mine)
    on_slurm = [
        job
        for job in _own(target, target.manager.slurm_jobs(), mine)
        if job["ended_at"] is None and not server
    ]
    if server:
        on = target.manager.server(server)["server_name"]
        found = [each for each in found if any(member["server_name"] == on for member in each["members"])]
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
@on_target
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
@on_target
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
        raise Failure(f"not granted: {target.placed(lease.detail)}{waits}", REFUSED)
    tell(lease)


@main.command(cls=DemandCommand)
@click.option(
    "-e", "--env", "environment", multiple=True, metavar="NAME[=VALUE]", help="Variable of the command."
)
@click.argument("lease_id", metavar="TASK_ID")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@on_target
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
@on_target
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
            lease_id, ranks, fencing_token=token, outcome=outcome, job_end=job_end, reason=reason
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
@on_target
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
@on_target
def preempt(target: Target, name: str, preemptor: str, dry_run: bool, as_json: bool) -> None:
    """Take a lease for a pending request: its job saves what it did, then its request waits again."""
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
@on_target
def cancel(target: Target, name: str, reason: str, as_json: bool) -> None:
    """Remove a pending request from the queue."""
    entry = cast("QueueEntry", target.manager.named(name, pending=True))
    done = target.manager.cancel(entry["task_id"], sequence=entry["sequence"], reason=reason)
    _done(done, as_json, entry, "cancelled", "has left the queue meanwhile")


@main.command(cls=DemandCommand)
@click.argument("name", required=False, shell_complete=completing.tasks)
@wide_option
@on_target
def explain(target: Target, /, name: str | None, wide: bool, as_json: bool, **options: Any) -> None:
    """Show whether a request would be granted now, where, or why not; exit with 1 if not.

    NAME is that of a pending request or a lease; without it the options say what is asked for.
    """
    given = _given(options)
    if name is not None and given:
        raise Failure(f"NAME and {given[0]}: say either a name or what is asked for", BAD_INPUT)
    if name is None and not given:
        raise Failure("say a NAME, which gpu-manager queue shows, or what is asked for: --gpus 1", BAD_INPUT)
    manager = target.manager
    answer = manager.explain(demand_of(None, options)) if name is None else manager.explain_named(name)
    print_json(answer) if as_json else tables.console(wide=wide).print(tables.explanation(answer))
    if not answer["would_be_granted"]:
        raise Exit(REFUSED)


def _given(options: Mapping[str, Any]) -> list[str]:
    """Return the options on the command line that say what is asked for."""
    context = click.get_current_context()
    return [
        param.opts[0]
        for param in context.command.get_params(context)
        if param.name in options and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]


def _done(done: bool, as_json: bool, entry: Mapping[str, Any], verb: str, otherwise: str) -> None:
    if not done:
        raise Failure(f"{name_in_words(entry)} {otherwise}", REFUSED)
    if as_json:
        print_json({"success": True, "task_id": entry["task_id"]})
    else:
        click.echo(f"{name_in_words(entry)}: {verb}")
