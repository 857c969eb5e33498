"""`gpu-manager maintenance`: windows of time in which servers take no leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from resource_manager.cli import completing
from resource_manager.cli.base import print_json
from resource_manager.cli.lazy_tables import cluster_tables, tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.session import say
from resource_manager.cli.target import Target
from resource_manager.manager.plurals import counted

if TYPE_CHECKING:
    from resource_manager.manager.cluster_results import WindowView


@main.group()
def maintenance() -> None:
    """Keep servers free in windows of time."""


@maintenance.command("add")
@click.argument("chosen", nargs=-1, required=True, metavar="SERVER...", shell_complete=completing.servers)
@click.option("--from", required=True, help="Begin, with a time zone: 2026-12-01T08:00+01:00.")
@click.option("--until", required=True, help="End, with a time zone.")
@click.option("--every", type=click.Choice(["week"]), help="Again every 7 times 24 hours.")
@click.option("--reason", default="", help="Reason, which those who wait are shown.")
@click.option("--preempt", is_flag=True, help="Preempt at the begin what still runs.")
@click.option("--dry-run", is_flag=True, help="Check the window and show it; change nothing.")
@on_target
def add(target: Target, /, chosen: tuple[str, ...], dry_run: bool, as_json: bool, **window: Any) -> None:
    """Add a window in which the servers take no leases, and which no job runs into."""
    from resource_manager.manager.maintenance_windows import WindowForm

    asked = WindowForm.of(servers=list(chosen), **window)
    made = target.manager.add_maintenance(asked, dry_run=dry_run)
    if as_json:
        print_json(made)
        return
    click.echo(_line(made) + (" (--dry-run: not added)" if dry_run else ""))
    if made["preempt"] and not target.manager.teams()["preemption"]:
        say("it preempts nothing, since the teams have no preemption = true")


@maintenance.command("list")
@wide_option
@on_target
def list_windows(target: Target, wide: bool, as_json: bool) -> None:
    """Show the windows that are open or to come, the next first."""
    found = target.manager.maintenance()
    if as_json:
        print_json(found)
        return
    if found:
        tables.console(wide=wide).print(cluster_tables.maintenance_table(found))
    else:
        click.echo("no maintenance windows")


@maintenance.command("remove")
@click.argument("number", type=int)
@click.option("--dry-run", is_flag=True, help="Check the number; change nothing.")
@on_target
def remove(target: Target, number: int, dry_run: bool, as_json: bool) -> None:
    """Remove a window by its number."""
    removed = target.manager.remove_maintenance(number, dry_run=dry_run)
    if as_json:
        print_json(removed)
    elif removed is None:
        click.echo(f"there is no maintenance window {number}; nothing to remove")
    else:
        click.echo(_line(removed) + (" (--dry-run: not removed)" if dry_run else " (removed)"))


def _line(window: WindowView) -> str:
    again = f", every {window['every']}" if window["every"] else ""
    why = f": {window['reason']}" if window["reason"] else ""
    running = f"; {counted(len(window['running']), 'lease')} there now" if window["running"] else ""
    state = " (open)" if window["is_open"] else ""
    ends = ", preempts" if window["preempt"] else ""
    return (
        f"{window['id']}  {', '.join(window['servers'])}  {window['from']} until {window['until']}"
        f"{again}{ends}{state}{why}{running}"
    )
