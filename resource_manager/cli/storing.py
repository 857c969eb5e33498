"""`gpu-manager store`: create and check a database, move a state from one store to another."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import click

from resource_manager.cli.base import BAD_INPUT, REFUSED, Failure, print_json
from resource_manager.cli.commands import json_option, main
from resource_manager.cli.target import Target, exit_codes
from resource_manager.errors import redact

if TYPE_CHECKING:
    from resource_manager.storage.sql.database import Database


@main.group()
def store() -> None:
    """Create and check a store, and move the state to another one."""


@store.command()
@click.pass_obj
@exit_codes
def create(target: Target) -> None:
    """Create the tables and views of a postgresql://, mysql:// or sqlite:// store where they are missing."""
    with closing(_database(target)) as database:
        database.create()
        click.echo(f"{database.address}: its tables are there")


@store.command()
@json_option
@click.pass_obj
@exit_codes
def check(target: Target, as_json: bool) -> None:
    """Say what the store lacks, or where it may lose leases; exit with 1 if there is anything."""
    from resource_manager.storage import checks

    settings = _of_store(target)
    findings = checks.check(settings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(f"{'ok     ' if finding.ok else 'MISSING'}  {finding.text}")
    if not all(finding.ok for finding in findings):
        raise Failure(f"{_shown(settings.store)}: not everything is there", REFUSED)


@store.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--to", required=True, help="URL of the store that the state goes to; clients are told.")
@click.pass_obj
@exit_codes
def export(target: Target, file: Path, to: str) -> None:
    """Write the state to FILE and refuse every later change of it here.

    The file holds the leases, the queue, the servers and the hashes of the service's tokens. Import it into
    the other store at once: until then nobody can renew a lease. History stays: export that before.
    """
    from resource_manager.storage import open_store
    from resource_manager.storage.transfer import export_state

    settings = _of_store(target)
    if "://" not in to:
        raise Failure(f"--to must be the URL of a store, got {to!r}", BAD_INPUT)
    with closing(open_store(settings.store, settings)) as opened:
        done = export_state(opened, file, _shown(to), _token_rows(settings))
    leases, pending = _count(done.snapshot.leases, "lease"), _count(done.snapshot.pending, "pending request")
    click.echo(
        f"{file}: {leases}, {pending}, {_count(done.tokens, 'token')}; {_shown(settings.store)} takes no "
        f"change any more. Next: gpu-manager --store '{_shown(to)}' store import {file}"
    )


@store.command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.pass_obj
@exit_codes
def import_(target: Target, file: Path) -> None:
    """Write the state in FILE into this store, which must be empty, or be the one it was exported from.

    The time to live of each lease is extended by the pause since the export.
    """
    from resource_manager.rest.assemble import shared_tokens
    from resource_manager.rest.tokens import Token
    from resource_manager.storage import open_store
    from resource_manager.storage.transfer import import_state, read_export

    settings = _of_store(target)
    exported = read_export(file)
    tokens = shared_tokens(settings)
    with closing(open_store(settings.store, settings)) as opened:
        if tokens is not None and opened.refresh(None) is None:
            for row in exported.tokens:  # before the state, so that an import that broke off can be repeated
                tokens.put(Token.from_row(row))
        pause_s = import_state(opened, exported)
    click.echo(
        f"{_shown(settings.store)}: {_count(exported.snapshot.leases, 'lease')}, extended by the pause of "
        f"{pause_s:.1f} s"
    )
    if exported.tokens and tokens is None:
        raise Failure("the state is there; the tokens are not: this store keeps none", REFUSED)


def _of_store(target: Target) -> Any:
    if target.url:
        raise Failure("a service does not move its store: give --store, not --url", BAD_INPUT)
    return target.settings()


def _database(target: Target) -> Database:
    from resource_manager.storage import SQL_SCHEMES
    from resource_manager.storage.sql.database import Database

    settings = _of_store(target)
    if settings.store.partition("://")[0] not in SQL_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SQL_SCHEMES)
        raise Failure(f"store create is for {known} only, not {redact(settings.store)}", BAD_INPUT)
    return Database(settings.store)


def _token_rows(settings: Any) -> list[dict[str, Any]]:
    from resource_manager.rest.assemble import shared_tokens

    tokens = shared_tokens(settings)
    return [] if tokens is None else [asdict(token) for token in tokens.read().values()]


def _shown(url: str) -> str:
    """Return the URL without its password and options, but with its namespace."""
    namespace = dict(parse_qsl(url.partition("?")[2])).get("namespace")
    return redact(url) + (f"?namespace={namespace}" if namespace else "")


def _count(items: Any, name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"
