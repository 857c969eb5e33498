"""Command `history`: the changes as a list, or in a file for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import click

from resource_manager.cli.base import BAD_INPUT, FILE, Failure, print_json
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.target import Target
from resource_manager.manager.plurals import counted
from resource_manager.manager.wording import What, matches, what_of


@main.command()
@click.option("--after", type=click.IntRange(0, 2**53), help="The first changes after this version.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--all", "renewals", is_flag=True, help="Show renewals of leases, too.")
@click.option("--by", default="", help="Only what this caller asked for; * stands for any text.")
@click.option("--what", type=click.Choice([str(what) for what in What]), help="Only changes that do this.")
@wide_option
@click.option(
    "--export",
    type=FILE,
    help="Write the whole kept history into this file, for gpu-simulate replay --history.",
)
@click.option(
    "--archive", type=FILE, help="Like --export, but append only the changes that the file does not have yet."
)
@on_target
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
    if (export or archive) and (after is not None or renewals or by or what):
        advice = "leave out --after, --all, --by and --what"
        raise Failure(f"--export and --archive write the whole history: {advice}", BAD_INPUT)
    if archive is not None:
        from resource_manager.storage.archive import extend

        written = {"file": str(archive), "changes": extend(archive, target.manager)}
        _show_written(written, "new change", as_json)
        return
    if export is not None:
        from resource_manager.storage.history_file import collect, write_file

        recorded = collect(target.manager)
        write_file(recorded, export)
        written = {"file": str(export), "changes": len(recorded.changes), "forgotten": recorded.forgotten}
        _show_written(written, "change", as_json)
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


def _show_written(written: Mapping[str, Any], noun: str, as_json: bool) -> None:
    print_json(written) if as_json else click.echo(f"{written['file']}: {counted(written['changes'], noun)}")


def _changes(
    manager: Any, after: int | None, limit: int, is_shown: Callable[[Mapping[str, Any]], bool]
) -> list[Any]:
    """Return the first changes shown after a version, or the newest ones, in order."""
    from resource_manager.manager.recorded_changes import newest_changes

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
    from resource_manager.manager.recorded_changes import MAX_LOOKED_AT, names_at, newest_changes

    newest = shown[-1]["version"] if shown else 0
    return names_at(shown, islice(newest_changes(manager.history, newest), MAX_LOOKED_AT))
