"""`gpu-manager diff`, `apply`, `cluster` and `teams`: the stored cluster, and the file that defines it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, REFUSED, Failure, confirm, print_json
from resource_manager.cli.lazy_tables import cluster_tables, tables
from resource_manager.cli.program import json_option, main, on_target, wide_option
from resource_manager.cli.target import F, Target, exit_codes
from resource_manager.errors import InvalidRequestError

if TYPE_CHECKING:  # loads pydantic
    from resource_manager.manager.cluster_change import ApplyOptions
    from resource_manager.manager.cluster_file.reading import ClusterFiles
    from resource_manager.manager.cluster_results import ClusterDiff


def shared_options(command: F) -> F:
    """Add the files and the consent that `diff` and `apply` take."""
    for option in (
        json_option,
        click.option("--force", is_flag=True, help="Take the file's GPUs of a server, not those adopted."),
        click.option(
            "--retire",
            multiple=True,
            shell_complete=completing.servers,
            help="Let this server leave once its leases have ended.",
        ),
        click.option(
            "--remove",
            multiple=True,
            help="End a section: cluster, teams, maintenance, health, sign_on or notices.",
        ),
        click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]..."),
    ):
        command = option(command)
    return command


@main.command()
@shared_options
@click.pass_obj
@exit_codes
def diff(target: Target, /, files: tuple[Path, ...], as_json: bool, **consent: Any) -> None:
    """Show what `apply` would change; exit with 1 if it would change anything.

    FILE is a TOML file of the cluster; default: GPU_MANAGER_INVENTORY.
    """
    found = _diff(target, _read(target, files), _options(**consent))
    print_json(found) if as_json else _show(found)
    if found["changed"]:
        raise Exit(REFUSED)


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@shared_options
@click.pass_obj
@exit_codes
def apply(target: Target, /, files: tuple[Path, ...], yes: bool, as_json: bool, **consent: Any) -> None:
    """Make the cluster what FILE says: servers, settings, teams, windows; all of it or nothing.

    A section that the file lacks stays as it is. FILE is a TOML file; default: GPU_MANAGER_INVENTORY.
    """
    if as_json and not yes:
        raise Failure("--json cannot ask for confirmation: add --yes", BAD_INPUT)
    read, options = _read(target, files), _options(**consent)
    found = _diff(target, read, options)
    if not as_json:
        _show(found)
    if found["changed"]:
        if not (yes or found["refused"]):
            confirm(f"Apply this to {target.place}?")
        try:
            found = target.manager.apply(read.form, options, revision=found["revision"])
        except InvalidRequestError as error:
            raise read.located(error) from error
    if as_json:
        print_json(found)
    elif found["changed"]:
        click.echo(f"applied to {target.place}")


@main.command()
@on_target
def cluster(target: Target, as_json: bool) -> None:
    """Print the stored cluster as a file that `apply` takes again."""
    found = target.manager.cluster()
    print_json(found) if as_json else click.echo(found["toml"], nl=False)


@main.command()
@wide_option
@on_target
def teams(target: Target, wide: bool, as_json: bool) -> None:
    """Show what each team is guaranteed, may hold and holds."""
    found = target.manager.teams()
    print_json(found) if as_json else tables.console(wide=wide).print(cluster_tables.teams_table(found))


def _read(target: Target, files: tuple[Path, ...]) -> ClusterFiles:
    from resource_manager.manager.cluster_file.reading import ClusterFiles

    usual = target.configured().inventory
    paths = files if files or usual is None else (usual,)
    if not paths:
        raise Failure("name a FILE of the cluster, or set GPU_MANAGER_INVENTORY to one", BAD_INPUT)
    read = ClusterFiles(paths)
    names = ", ".join(map(str, paths))
    for section in read.definition.empty:
        click.echo(f"{names}: {section} is empty: nothing changes (--remove {section} ends it)", err=True)
    if not read.form.model_fields_set:
        click.echo(f"{names}: there is no section: nothing changes", err=True)
    return read


def _options(remove: tuple[str, ...], retire: tuple[str, ...], force: bool) -> ApplyOptions:
    from resource_manager.manager.cluster_change import ApplyOptions

    return ApplyOptions(remove, retire, force)


def _diff(target: Target, read: ClusterFiles, options: ApplyOptions) -> ClusterDiff:
    try:
        found: ClusterDiff = target.manager.diff(read.form, options)
    except InvalidRequestError as error:
        raise read.located(error) from error
    return found


def _show(diff: ClusterDiff) -> None:
    for line in diff["lines"] or ["no difference"]:
        click.echo(line)
