"""`gpu-manager teams`: show the rules of the teams, and what each holds."""

from __future__ import annotations

from resource_manager.cli.base import print_json
from resource_manager.cli.lazy_tables import cluster_tables, tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.target import Target


@main.command()
@wide_option
@on_target
def teams(target: Target, wide: bool, as_json: bool) -> None:
    """Show what each team is guaranteed, may hold and holds."""
    found = target.manager.teams()
    print_json(found) if as_json else tables.console(wide=wide).print(cluster_tables.teams_table(found))
