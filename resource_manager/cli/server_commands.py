"""Commands that close and open servers, and the one that ends every lease."""

from __future__ import annotations

import click

from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, Failure, confirm, print_json
from resource_manager.cli.program import main, on_target
from resource_manager.cli.target import Target
from resource_manager.manager.plurals import numbered_gpus

gpu_option = click.option("--gpu", help="One GPU of the server, by number or UUID.")


@main.command()
@click.argument("server", shell_complete=completing.servers)
@gpu_option
@click.option("--reason", default="", help="Reason, shown to every user.")
@click.option("--failed", is_flag=True, help="Mark the server as broken, not only closed.")
@on_target
def drain(target: Target, server: str, gpu: str | None, reason: str, failed: bool, as_json: bool) -> None:
    """Grant no new leases on a server (id or name) or one of its GPUs; its current leases continue."""
    view = target.manager.drain(server, gpu, reason=reason, failed=failed)
    if as_json:
        print_json(view)
    elif gpu is None:
        click.echo(f"{view['server_name']}: drained, {view['running_tasks']} still running")
    else:
        click.echo(f"{view['server_name']}: GPU {gpu} drained")


@main.command()
@click.argument("server", shell_complete=completing.servers)
@gpu_option
@on_target
def resume(target: Target, server: str, gpu: str | None, as_json: bool) -> None:
    """Allow new leases on a drained server (id or name) again; with --gpu on one closed GPU of it."""
    view = target.manager.resume(server, gpu)
    if as_json:
        print_json(view)
        return
    closed = [each["gpu_id"] for each in view["gpus_closed"]]
    rest = f"; still closed: {numbered_gpus(closed)}, which --gpu {closed[0]} opens" if closed else ""
    where = "takes" if gpu is None else f"GPU {gpu} takes"
    click.echo(f"{view['server_name']}: {where} leases again{rest}")


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@on_target
def reset(target: Target, yes: bool, as_json: bool) -> None:
    """End all leases and empty the queue. Dangerous while jobs run."""
    if not yes:
        if as_json:
            raise Failure("--json cannot ask for confirmation: add --yes", BAD_INPUT)
        confirm("End every lease and empty the queue?")
    target.manager.reset()
    print_json({"success": True}) if as_json else click.echo("reset")
