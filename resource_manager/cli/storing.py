"""`gpu-manager store`: create and check a database, back up a state and restore it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import click

from resource_manager.cli.base import BAD_INPUT, FILE, REFUSED, Failure, print_json
from resource_manager.cli.program import main, on_target
from resource_manager.cli.target import Target, exit_codes
from resource_manager.errors import CorruptStateError, redact
from resource_manager.manager.plurals import counted

if TYPE_CHECKING:
    from resource_manager.storage.sql.database import Database


@main.group()
def store() -> None:
    """Create and check a store, back up its state and restore it, here or in another one."""


@store.command()
@click.pass_obj
@exit_codes
def create(target: Target) -> None:
    """Create the tables and views of a postgresql://, mysql:// or sqlite:// store where they are missing."""
    with closing(_database(target)) as database:
        database.create()
        click.echo(f"{database.address}: its tables are there")


@store.command()
@on_target
def check(target: Target, as_json: bool) -> None:
    """Say what the store lacks, where it may lose leases, or that its state cannot be read; exit 1 if so."""
    from resource_manager.storage import checks

    settings = _of_store(target)
    findings = checks.check(settings)
    findings += checks.of_state(settings, findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(f"{'ok     ' if finding.ok else 'MISSING'}  {finding.text}")
    if not all(finding.ok for finding in findings):
        raise Failure(f"{_shown(settings.store)}: not everything is there", REFUSED)


@store.command()
@click.argument("file", type=FILE)
@click.option("--final", is_flag=True, help="Close the state here: it goes on where FILE is restored.")
@click.option("--to", help="With --final: URL of the store where it will go on; clients are told.")
@click.pass_obj
@exit_codes
def backup(target: Target, file: Path, final: bool, to: str | None) -> None:
    """Write the state to FILE; nothing stops, unless it is the --final backup before a move.

    The file holds leases and queue with their stored jobs, servers, and the hashes of the service's tokens.
    History stays: export that before a move.
    """
    from resource_manager.storage import open_store
    from resource_manager.storage.backup import in_utc, write_backup

    settings = _of_store(target)
    if to is not None and (not final or "://" not in to):
        raise Failure(f"--to goes with --final and is the URL of a store, got {to!r}", BAD_INPUT)
    with closing(open_store(settings.store, settings)) as opened:
        reason = None
        if final:
            there = "the store where it is restored" if to is None else _shown(to)
            reason = (
                f"the state was closed by the final backup {file.name}, written at {in_utc(opened.now())}: "
                f"set GPU_MANAGER_STORE to {there}, or take it back here with gpu-manager store restore"
            )
        done = write_backup(opened, file, _token_rows(settings), closing=reason)
    leases = counted(len(done.snapshot.leases), "lease")
    pending = counted(len(done.snapshot.pending), "pending request")
    tokens = counted(len(done.tokens), "token")
    went = "it goes on"
    if final:
        option = "" if to is None else f" --store '{_shown(to)}'"
        went = f"it takes no change any more. Next: gpu-manager{option} store restore {file}"
    click.echo(
        f"{file}: {leases}, {pending}, {tokens} of {_shown(settings.store)} at version "
        f"{done.snapshot.version}; {went}"
    )


@store.command()
@click.argument("file", type=FILE)
@click.option("--force", is_flag=True, help="Give up the state that this store holds.")
@click.pass_obj
@exit_codes
def restore(target: Target, file: Path, force: bool) -> None:
    """Make the state in FILE this store's; leases whose jobs may run end later by the time since the backup.

    Nothing is granted for the confirmation window, nor on any server before it was searched for jobs of
    leases that the backup does not know: none after a --final one.
    """
    from resource_manager.rest.assemble import shared_tokens
    from resource_manager.rest.tokens import tokens_of
    from resource_manager.storage import open_store
    from resource_manager.storage.backup import read_backup
    from resource_manager.storage.backup import restore as restore_state

    settings = _of_store(target)
    try:
        found = read_backup(file)
    except CorruptStateError as error:
        raise Failure(str(error), BAD_INPUT) from error
    tokens = shared_tokens(settings)
    with closing(open_store(settings.store, settings)) as opened:
        done = restore_state(opened, found, force=force)
        are_put = False
        if tokens is not None and not tokens.read():
            are_put = bool(found.tokens)
            for each in tokens_of(map(json.dumps, found.tokens), str(file)).values():
                tokens.put(each)
    leases = counted(len(found.snapshot.leases), "lease")
    extended = "extended" if found.is_final and not force else "those with a job extended"
    click.echo(f"{_shown(settings.store)}: {leases}, {extended} by the {done.pause_s:.1f} s since the backup")
    if are_put:
        click.echo(
            f"{counted(len(found.tokens), 'token')} as of the backup: one that was revoked or rotated since "
            "is valid again: gpu-manager token list shows them, gpu-manager token revoke ID ends one"
        )
    if done.unsearched:
        click.echo(
            f"{counted(len(done.unsearched), 'server')} closed until searched for jobs that the backup does "
            "not know: agents do that by themselves, gpu-manager reconcile where its launchers can look; on "
            "another server look, and say with gpu-manager resume SERVER that no job runs there without a "
            "lease"
        )
    if found.tokens and tokens is None:
        raise Failure("the state is there; the tokens are not: this store keeps none", REFUSED)


def _of_store(target: Target) -> Any:
    target.require_store("a service does not move its store")
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
    return [] if tokens is None else [token.row() for token in tokens.read().values()]


def _shown(url: str) -> str:
    """Return the URL without its password and options, but with its namespace."""
    namespace = dict(parse_qsl(url.partition("?")[2])).get("namespace")
    return redact(url) + (f"?namespace={namespace}" if namespace else "")
