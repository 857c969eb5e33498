"""Commands of the service's access tokens."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from resource_manager.cli.base import FILE, REFUSED, Duration, Failure, print_json
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.target import Target
from resource_manager.rest import tokens
from resource_manager.rest.tokens import Role, Token, TokenFile, TokenStore

tokens_file_option = click.option(
    "--tokens",
    "tokens_file",
    envvar="GPU_MANAGER_TOKENS",
    type=FILE,
    help="Token file; default: the store's Redis or database, else ~/.config/gpu-manager/tokens.json.",
)


@main.group()
def token() -> None:
    """Manage the service's bearer tokens: reader reads, user also allocates, operator may do everything.

    A token of role agent is for the agent of its --server only.
    """


def token_store(target: Target, tokens_file: Path | None) -> TokenStore:
    if tokens_file is not None:
        return TokenFile(tokens_file)
    target.require_store("tokens are in the store, not at a service")
    from resource_manager.rest.assemble import persistence_of

    return persistence_of(target.settings()).tokens


@token.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice([str(role) for role in Role]), default="user", show_default=True)
@click.option(
    "--team",
    "teams",
    multiple=True,
    help="Team that its holder may name, repeatable, the first the default; without one: any team.",
)
@click.option("--server", default="", help="Server whose reports the token may send, for role agent.")
@click.option(
    "--expires", "expires_s", type=Duration(), help="Time until it expires, such as 90d; default: never."
)
@click.option("--run-jobs", is_flag=True, help="Agents run jobs for its holder: see gpu-manager submit.")
@tokens_file_option
@on_target
def token_create(
    target: Target,
    name: str,
    role: str,
    teams: tuple[str, ...],
    server: str,
    expires_s: float | None,
    run_jobs: bool,
    tokens_file: Path | None,
    as_json: bool,
) -> None:
    """Create a token; it is shown once and stored only as a hash."""
    store = token_store(target, tokens_file)
    text = tokens.create(
        store, name, Role.named(role), teams=teams, server=server, expires_s=expires_s, run_jobs=run_jobs
    )
    _print_issued(store, text, as_json)


def _print_issued(store: TokenStore, text: str, as_json: bool) -> None:
    made = tokens.find(store.read(), text)
    if not as_json or made is None:
        click.echo(text)
        return
    print_json({**_shown(made), "token": text})


def _no_token(token_id: str) -> Failure:
    return Failure(f"there is no token {token_id!r}: gpu-manager token list shows the ids", REFUSED)


def _shown(item: Token) -> dict[str, Any]:
    """Return what may be seen of a token: all but the hash of its secret."""
    return {name: value for name, value in asdict(item).items() if name != "digest"}


@token.command("rotate")
@click.argument("token_id")
@click.option(
    "--expires",
    "expires_s",
    type=Duration(),
    help="Time until the new one expires, such as 90d; default: as long as the old one was made for.",
)
@click.option("--overlap", "overlap_s", type=Duration(), help="Time for which the old one still works.")
@tokens_file_option
@on_target
def token_rotate(
    target: Target,
    token_id: str,
    expires_s: float | None,
    overlap_s: float | None,
    tokens_file: Path | None,
    as_json: bool,
) -> None:
    """Create a token with the rights of TOKEN_ID, which ends: at once, or after --overlap."""
    store = token_store(target, tokens_file)
    if token_id not in store.read():
        raise _no_token(token_id)
    text = tokens.rotate(store, token_id, expires_s=expires_s, overlap_s=overlap_s or 0.0)
    _print_issued(store, text, as_json)


@token.command("list")
@tokens_file_option
@wide_option
@on_target
def token_list(target: Target, tokens_file: Path | None, wide: bool, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    store = token_store(target, tokens_file)
    found = sorted(store.read().values(), key=lambda token: token.created_at)
    uses = store.last_uses()
    if as_json:
        print_json([{**_shown(item), "last_used_at": uses.get(item.token_id)} for item in found])
        return
    from resource_manager.cli.fitted_table import Column, FittedTable
    from resource_manager.manager.answer_words import duration

    table = FittedTable(
        Column("id"),
        Column("name"),
        Column("role"),
        Column("teams", 2),
        Column("server", 3),
        Column("created", 1),
        Column("expires"),
        Column("last used"),
    )
    now = time.time()
    for item in found:
        created = datetime.fromtimestamp(item.created_at, UTC).strftime("%Y-%m-%d")
        ends = "never" if item.expires_at is None else f"in {duration(item.expires_at - now)}"
        ends = "expired" if item.has_expired(now) else ends
        used = f"{duration(now - uses[item.token_id])} ago" if item.token_id in uses else "never"
        teams = ", ".join(item.teams)
        table.add_row(item.token_id, item.name, item.role, teams, item.server, created, ends, used)
    tables.console(wide=wide).print(table)


@token.command("revoke")
@click.argument("token_id")
@tokens_file_option
@on_target
def token_revoke(target: Target, token_id: str, tokens_file: Path | None, as_json: bool) -> None:
    """Revoke a token by its id."""
    if not token_store(target, tokens_file).delete(token_id):
        raise _no_token(token_id)
    print_json({"success": True}) if as_json else click.echo(f"{token_id}: revoked")
