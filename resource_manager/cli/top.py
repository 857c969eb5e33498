"""`gpu-manager top`: what every GPU does now, and for whom."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, INTERVAL, Failure, print_json
from resource_manager.cli.program import main, on_target
from resource_manager.cli.session import Session
from resource_manager.cli.signals import Interrupted
from resource_manager.cli.target import Target
from resource_manager.errors import UnknownNodeError

if TYPE_CHECKING:
    from resource_manager.manager.use_results import ServerUse

RESIZE_S = 0.5
"""Longest time until the table fits the terminal again after its size has changed."""


@main.command()
@click.argument("servers", nargs=-1, metavar="[SERVER]...", shell_complete=completing.servers)
@click.option("--every", "interval_s", type=INTERVAL, default=2.0, show_default=True)
@click.option("--once", is_flag=True, help="Print once and end.")
@on_target
def top(target: Target, servers: tuple[str, ...], interval_s: float, once: bool, as_json: bool) -> None:
    """Show the use of each GPU and its lease until q or Ctrl-C: of all servers or each SERVER (id or name).

    The figures are those that the agents last reported.
    """
    if as_json and not once:
        raise Failure("--json goes with --once", BAD_INPUT)
    found = _use(target, servers)
    if as_json:
        print_json(found)
        return
    from resource_manager.cli import gpu_table, tables

    console = tables.console()
    if once or not console.is_terminal:
        console.print(gpu_table.servers(found))
        return
    from rich.live import Live

    with (
        suppress(Interrupted),
        Session(target) as session,
        _keys_at_once(),
        Live(gpu_table.servers(found), console=console, screen=True, auto_refresh=False) as live,
    ):
        due, trouble = time.monotonic() + interval_s, ""
        while not _is_q_pressed(min(due - time.monotonic(), RESIZE_S)):
            session.signals.check()
            if time.monotonic() >= due:
                found, trouble = session.ask_again(lambda manager: _use(target, servers), found)
                due = time.monotonic() + interval_s
            live.update(tables.headed(trouble, gpu_table.servers(found)), refresh=True)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Let keys arrive without Enter and unseen, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_q_pressed(within_s: float) -> bool:
    """Wait for so long, or until a key is pressed; return True if it is q, or the terminal is gone."""
    if not sys.stdin.isatty():
        time.sleep(max(within_s, 0.0))
        return False
    ready, _, _ = select.select([sys.stdin], [], [], max(within_s, 0.0))
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"")


def _use(target: Target, servers: Sequence[str]) -> list[ServerUse]:
    found = target.manager.gpus()
    if not servers:
        return found
    known = {name: row for row in found for name in (row["server_name"], str(row["server_id"]))}
    for name in servers:
        if name not in known:
            raise UnknownNodeError(name, [row["server_name"] for row in found])
    wanted = [known[name]["server_name"] for name in servers]
    return [row for row in found if row["server_name"] in wanted]
