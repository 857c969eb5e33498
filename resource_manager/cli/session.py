"""Calls of a command to its store: a silent one holds up no signal, and what is to be given back is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from resource_manager import errors
from resource_manager.cli.base import one_line
from resource_manager.cli.signals import Calls, Signals
from resource_manager.core.names import display_name
from resource_manager.manager.patience import patiently

if TYPE_CHECKING:
    from resource_manager.cli.target import Target

T = TypeVar("T")

GIVE_BACK_S = 30.0
"""Longest wait for a silent store at the end of a command, if no signal came."""

RETRY_FOR = "10min"
"""Time for which a process of its own goes on to give back what a command could not."""


class Session:
    """Calls of a command to its manager, one after another in a thread; the main one waits for signals."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.signals = Signals()

    def __enter__(self) -> Self:
        self.signals.__enter__()
        self._calls, self._waits = Calls(self.signals), Calls(self.signals)
        return self

    def __exit__(self, *error: object) -> None:
        self.signals.__exit__()
        if self._calls.is_busy or self._waits.is_busy:  # it waits for the store, and so would closing it
            self._target.abandon()

    def begin(self, call: Callable[[Any], T]) -> Future[T]:
        """Begin a call of the manager after those before it."""
        return self._calls.begin(lambda: call(self._target.manager))

    def ask(self, call: Callable[[Any], T]) -> T:
        """Return what a call of the manager gives; raises `Interrupted` as soon as a signal comes."""
        return self.signals.result(self.begin(call))

    def wait_for(self, call: Callable[[Any], T]) -> T:
        """Return what a call gives that changes nothing and takes long: calls after it do not wait for it."""
        return self.signals.result(self._waits.begin(lambda: call(self._target.manager)))

    def ask_patiently(self, call: Callable[[Any], T], limit_s: float) -> T:
        """Return what a call of the manager gives, made again while the store is silent."""
        return patiently(lambda: self.ask(call), limit_s, self.signals.pause)

    def ask_again(self, call: Callable[[Any], T], before: T) -> tuple[T, str]:
        """Return what a call gives now; while nobody answers what it gave `before`, and a line about that."""
        try:
            return self.ask(call), ""
        except errors.OutageError as error:
            return before, one_line(error)

    @contextmanager
    def repeating(self, call: Callable[[Any], object], every_s: float) -> Iterator[None]:
        """Make a call of the manager every so often while the block runs, whose errors are nobody's."""
        over = Event()

        def repeat() -> None:
            while not over.wait(every_s):
                if not self._calls.is_busy:
                    self.begin(call)

        Thread(target=repeat, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def give_back(self, lease_id: str, call: Callable[[Any], object]) -> None:
        """Make the call that ends a request or lease; a process of its own does where the store is silent."""
        future, name = self.begin(call), display_name(lease_id, {})
        if self.signals.is_settled(future, GIVE_BACK_S):
            error = future.exception()
            if error is None or isinstance(error, errors.LeaseNotFoundError):
                return
            if isinstance(error, errors.StateLostError):  # there is nothing to give back
                say(str(error))
                return
            if is_refused(error):  # another process of this environment would be, too
                say(f"{name} could not be given back: {error}; then gpu-manager stop {name}")
                return
            if not errors.is_outage(error):
                raise error
        process = self._leave(lease_id)
        say(f"{name} could not be given back yet; process {process} does it once the store answers")

    def _leave(self, lease_id: str) -> int:
        """Start a process of its own session that goes on to stop this lease; return its id."""
        command = ("-m", "resource_manager.cli", "stop", lease_id, "--retry-for", RETRY_FOR)
        return subprocess.Popen(
            [sys.executable, "-P", *command],
            env=self._target.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).pid


def is_refused(error: BaseException) -> bool:
    """Return whether the login, or what its token asks for, is refused until somebody corrects that."""
    return errors.is_login_refused(error) or getattr(error, "status", None) == 403


def say(line: str) -> None:
    """Print a line about the command itself on standard error."""
    with suppress(OSError):  # the terminal is gone
        click.echo("\n".join(map(one_line, f"gpu-manager: {line}".splitlines())), err=True)
