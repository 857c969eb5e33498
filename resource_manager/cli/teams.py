"""`gpu-manager teams`: show the rules of the teams, or replace them by those of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from resource_manager.cli.base import print_json
from resource_manager.cli.commands import json_option, main, wide_option
from resource_manager.cli.target import Target, exit_codes
from resource_manager.errors import InvalidRequestError
from resource_manager.lazy import lazy_module

if TYPE_CHECKING:
    from resource_manager.cli import tables
else:  # loads rich, which no command with --json needs
    tables = lazy_module("resource_manager.cli.tables")


@main.group(invoke_without_command=True)
@wide_option
@json_option
@click.pass_context
@exit_codes
def teams(context: click.Context, wide: bool, as_json: bool) -> None:
    """Show what each team is guaranteed, may hold and holds."""
    if context.invoked_subcommand is None:
        found = context.obj.manager.teams()
        print_json(found) if as_json else tables.console(wide=wide).print(tables.teams_table(found))


@teams.command("apply")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check the file and show what would change; change nothing.")
@json_option
@click.pass_obj
@exit_codes
def apply(target: Target, file: Path, dry_run: bool, as_json: bool) -> None:
    """Replace the rules of the teams by those of a TOML file."""
    from resource_manager.manager.teams import difference_in_words
    from resource_manager.manager.teams_file import load_teams, located

    rules = load_teams(file)
    try:
        made = target.manager.apply_teams(rules, dry_run=dry_run)
    except InvalidRequestError as error:
        raise located(error, file) from error
    if as_json:
        print_json(made)
        return
    for row in made["differences"]:
        click.echo(difference_in_words(row))
    if made["changed"]:
        click.echo(f"{file}: {'nothing was changed (--dry-run)' if dry_run else 'applied'}")
    else:
        click.echo(f"{file}: these rules are in force already")
