"""`gpu-manager top`: what every GPU does now, and for whom."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from resource_manager.cli import completing
from resource_manager.cli.base import BAD_INPUT, INTERVAL, Failure, is_terminal, one_line, print_json
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import main, on_target
from resource_manager.cli.session import Session
from resource_manager.cli.signals import Interrupted
from resource_manager.cli.target import Target
from resource_manager.errors import NO_SERVERS, OutageError, UnknownNodeError

if TYPE_CHECKING:
    from resource_manager.manager.use_results import ServerUse

RESIZE_S = 0.5
"""Longest time until the table fits the terminal again after its size has changed."""

ANSWER_S = 0.2
"""Longest time until an answer is shown."""


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
    from resource_manager.cli import gpu_table

    console = tables.console()
    none = target.placed(NO_SERVERS)
    if once or not console.is_interactive:
        console.print(tables.headed("" if found else none, gpu_table.servers(found, console.width)))
        return
    from rich.live import Live

    with (
        suppress(Interrupted),
        Session(target) as session,
        _keys_at_once(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        due, trouble = time.monotonic() + interval_s, ""
        answer: Future[list[ServerUse]] | None = None
        while True:
            line = trouble or ("" if found else none)
            shown = gpu_table.servers(found, console.width, console.height - bool(line))
            live.update(tables.headed(line, shown), refresh=True)
            if _is_q_pressed(ANSWER_S if answer else min(due - time.monotonic(), RESIZE_S)):
                break
            session.signals.check()
            if answer is None and time.monotonic() >= due:
                answer = session.begin(lambda manager: _use(target, servers))
            if answer is not None and answer.done():
                try:
                    found, trouble = answer.result(), ""
                except OutageError as error:
                    trouble = one_line(error)
                due, answer = time.monotonic() + interval_s, None


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Let keys arrive without Enter and unseen, if standard input is a terminal."""
    if not is_terminal(sys.stdin):
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
    if not is_terminal(sys.stdin):
        time.sleep(max(within_s, 0.0))
        return False
    ready, _, _ = select.select([sys.stdin], [], [], max(within_s, 0.0))
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"")


def _use(target: Target, servers: Sequence[str]) -> list[ServerUse]:
    found = target.manager.gpus()
    if not servers:
        return found
    known = {str(row["server_id"]): row for row in found} | {row["server_name"]: row for row in found}
    for name in servers:
        if name not in known:
            raise UnknownNodeError(name, [row["server_name"] for row in found])
    wanted = [known[name]["server_name"] for name in servers]
    return [row for row in found if row["server_name"] in wanted]
