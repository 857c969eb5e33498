"""Signals that end a program within seconds, whatever it waits for: they wake the main thread, and only that.

What may take long, such as the call of a store that is silent, is done in a thread beside it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Lock, Thread
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PROMPT_S = 3.0
"""Longest wait for a silent store after a signal, so that the program has ended after 5 s."""

STOPS_S = 0.1
"""Time in which the others of a process group have stopped after Ctrl-Z, those that tidy up first, too."""


class Interrupted(SystemExit):
    """A signal came, or what was waited for must end; the program ends with its code."""

    code: int


class Signals:
    """The `first` SIGINT, SIGTERM or SIGHUP since it was entered, and when it came; later ones do nothing.

    SIGHUP does nothing under nohup. While it is entered, the main thread waits here and nowhere else. Also
    the end of a child wakes it.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at = 0.0
        self._closing = Lock()

    def __enter__(self) -> Self:
        self._awake, self._waker = os.pipe()
        for descriptor in (self._awake, self._waker):
            os.set_blocking(descriptor, False)
        self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in ENDING if number != signal.SIGHUP or not is_nohup]
        self._before: dict[int, Any] = {
            number: signal.signal(number, _wake_only) for number in (*heard, signal.SIGCHLD)
        }
        self._before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a job has the terminal
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._waker_before)
        with self._closing:  # a thread that was left behind may still want to wake somebody
            os.close(self._awake)
            os.close(self._waker)
            self._waker = -1

    @contextmanager
    def not_stopped(self) -> Iterator[None]:
        """Let Ctrl-Z stop, inside, neither this program nor the others of its process group, such as `tee`.

        While it is stopped it renews no lease, and its job would wait for a reader that is.
        """
        before = signal.signal(signal.SIGTSTP, _wake_only)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)

    def wake(self) -> None:
        """End the main thread's wait, from any thread."""
        with self._closing, suppress(BlockingIOError):  # full of wakes
            if self._waker >= 0:
                os.write(self._waker, b"\0")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something happens, at most `timeout_s`."""
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        if not poll.poll(None if timeout_s is None else max(1000 * timeout_s, 0.0)):
            return
        for number in os.read(self._awake, 4096):
            if number == signal.SIGTSTP:
                time.sleep(STOPS_S)
                os.killpg(0, signal.SIGCONT)
            if number in ENDING and self.first is None:
                self.first, self.first_at = signal.Signals(number), time.monotonic()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        self.wait(0.0)
        if self.first is not None:
            raise Interrupted(128 + self.first)

    def pause(self, duration_s: float) -> None:
        """Wait that long; raises `Interrupted` as soon as a signal comes."""
        deadline = time.monotonic() + duration_s
        while (left_s := deadline - time.monotonic()) > 0:
            self.check()
            self.wait(left_s)

    def result(self, call: Future[T]) -> T:
        """Return the result of a call in a thread; raises `Interrupted` as soon as a signal comes."""
        self.check()
        while not call.done():  # asked after each wait, which takes the wake of its end
            self.wait()
            self.check()
        return call.result()

    def is_settled(self, call: Future[Any], limit_s: float, after_signal_s: float = PROMPT_S) -> bool:
        """Wait for a call that no signal stops; return False if it is not over in time."""
        begun_at = time.monotonic()
        while not call.done():
            ends_at = begun_at + limit_s
            if self.first is not None:
                ends_at = min(ends_at, max(begun_at, self.first_at) + after_signal_s)
            if (left_s := ends_at - time.monotonic()) <= 0:
                return False
            self.wait(left_s)
        return True


def _wake_only(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's number is in the pipe."""


def interruptible(work: Callable[[], T], exit_code: int | None = None) -> T:
    """Return what the work gives; a signal ends the program at once, whatever the work's threads wait for.

    It ends with this exit code, by default as shells have it.
    """
    with Signals() as signals:
        try:
            return signals.result(Calls(signals).begin(work))
        except Interrupted as interrupted:
            leave(interrupted.code if exit_code is None else exit_code)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP raise `SystemExit` inside, so that what was started is ended, too.

    SIGHUP does nothing under nohup.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in heard:  # a terminal that is closed sends its signal twice
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def leave(exit_code: int) -> NoReturn:
    """End the program without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


class Calls:
    """Calls that are made one after another in a thread of their own; each end wakes the main thread."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._last: Future[Any] | None = None
        Thread(target=self._make, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Return True while a call is not over."""
        return self._last is not None and not self._last.done()

    def settle(self, limit_s: float) -> None:
        """Wait for the calls to be over, whatever signals come."""
        if self._last is not None:
            self._signals.is_settled(self._last, limit_s, limit_s)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Make the call after those before it."""
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._signals.wake())
        self._last = future
        self._waiting.put((future, call))
        return future

    def _make(self) -> None:
        while True:
            future, call = self._waiting.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
