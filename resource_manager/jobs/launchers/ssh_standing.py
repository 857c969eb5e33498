"""A Python program that stands on a server behind one ssh connection, and runs others there."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from resource_manager.jobs.launchers import standing_program

PROGRAM = "python3"

PYTHON_OF_LENGTH = (
    f"{PROGRAM} -I -S -c 'import os, sys; "
    'exec("p = bytes()\\nwhile len(p) < {0}: p += os.read(0, {0} - len(p)) or sys.exit(1)"); exec(p)\''
)
"""Command, for any shell, that runs a program of that many bytes from standard input and leaves the rest."""

MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Most bytes that are read of a program's output: a job may have put another in its account."""

ANSWER_S = 10.0
"""Time after which a server that opens no session, or a program that begins nothing any more, is lost."""

SILENT_S = 3 * standing_program.HEARTBEAT_S

IDLE_S = 60.0
"""Time for which a program without work stands: the next job comes soon."""

MAX_AGE_S = 600.0
"""Age from which a program is given no more work: the log-in's credentials may have changed."""


class Ended(NamedTuple):
    """Exit code of a program, below 0 after a signal, its output and its standard error."""

    code: int
    output: str
    complaint: str


class LostError(Exception):
    """The standing program is gone or does not answer; `ended` says how it ended, if that is known."""

    def __init__(self, reason: str, ended: Ended | None = None) -> None:
        super().__init__(reason)
        self.ended = ended


class _Message(BaseModel):
    """What a standing program says; a job may run in its account and have put another there."""

    model_config = ConfigDict(strict=True)

    id: int = 0
    code: int | None = None
    output: str = ""
    complaint: str = ""
    changed: list[str] = []
    failed: str = ""


class _Inbox:
    """What the standing program says to one who waits for it."""

    def __init__(self) -> None:
        self._said: SimpleQueue[_Message | LostError] = SimpleQueue()
        self.put = self._said.put

    def take(self, timeout_s: float) -> _Message | None:
        """Return the next message, None once the time is over; raises `LostError`."""
        try:
            said = self._said.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return None
        if isinstance(said, LostError):
            raise LostError(str(said), said.ended)
        return said


class Lookout:
    """Standing look at the jobs of a folder, for one thread at a time; its methods raise `OSError`."""

    def __init__(self, send: Callable[..., None], inbox: _Inbox) -> None:
        self._send, self._inbox = send, inbox
        self._watched: set[str] = set()

    def watch(self, key: str) -> None:
        """Tell of this job from now on, until it has ended."""
        self._send(watch=key)
        self._watched.add(key)

    def forget(self, key: str) -> None:
        """Tell no more of this job."""
        self._send(forget=key)
        self._watched.discard(key)

    def changed(self, timeout_s: float) -> set[str]:
        """Return the jobs that ended or whose output grew, once there are some, at most that much later."""
        said = self._inbox.take(timeout_s)
        if said is None:
            return set()
        if said.failed:
            raise OSError(said.failed)
        return self._watched.intersection(said.changed)


class StandingProgram:
    """Program that stands on a server and runs others, for any number of threads; they know its library.

    `connect` logs in and returns paramiko's client. It ends once it has been idle for `IDLE_S`. Raises what
    `connect` and paramiko raise.
    """

    def __init__(self, connect: Callable[[], Any], library: str) -> None:
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._numbers = count(1)
        self._inboxes: dict[int, _Inbox] = {}
        self._lost: LostError | None = None
        self._has_answered = False
        self._opened_at = self._used_at = time.monotonic()
        self._client = connect()
        try:
            self._transport = self._client.get_transport()
            self._channel = self._transport.open_session(timeout=ANSWER_S)
            program = (
                "own, names = {}, {'__name__': '__main__'}\n"
                f"exec({inspect.getsource(standing_program)!r}, own)\n"
                f"exec({library!r}, names)\nown['serve'](names)\n"
            )
            self._channel.exec_command(PYTHON_OF_LENGTH.format(len(program.encode())))
            self._channel.settimeout(standing_program.HEARTBEAT_S)
            self._send_all(program)
        except BaseException:
            self._client.close()
            raise
        threading.Thread(target=self._read, name="gpu-ssh", daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """Whether it may be given work."""
        return self._lost is None and not self._is_old and self._transport.is_active()

    @property
    def _is_old(self) -> bool:
        return time.monotonic() - self._opened_at >= MAX_AGE_S

    def run(self, program: str, timeout_s: float) -> Ended:
        """Run a program there; raises `TimeoutError` or, if it may have begun and run on, `LostError`."""
        deadline = time.monotonic() + timeout_s
        with self._inbox() as (number, inbox):
            begins_s = min(ANSWER_S, timeout_s) if self._has_answered else timeout_s
            self._send(id=number, program=program)
            said = inbox.take(begins_s)
            if said is None:
                raise self._end(LostError(f"no answer within {begins_s:g} s"))
            while said.code is None:
                said = inbox.take(deadline - time.monotonic())
                if said is None:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
        return Ended(said.code, said.output, said.complaint)

    @contextmanager
    def lookout(self, root: str) -> Iterator[Lookout]:
        """Yield a standing look at the jobs of a folder; raises `LostError`."""
        with self._inbox() as (number, inbox):
            yield Lookout(partial(self._send, id=number, root=root), inbox)
            self._send(id=number)

    def disown(self) -> None:
        """Send nothing more from this process, which was forked: the connection is its parent's."""
        self._transport.active = False

    def close(self) -> None:
        """End the program; those that it has begun go on."""
        self._end(LostError("it was closed"))

    @contextmanager
    def _inbox(self) -> Iterator[tuple[int, _Inbox]]:
        number, inbox = next(self._numbers), _Inbox()
        with self._lock:
            if self._lost is not None:
                raise LostError(str(self._lost), self._lost.ended)
            self._inboxes[number] = inbox
        try:
            yield number, inbox
        finally:
            with self._lock:
                del self._inboxes[number]
                self._used_at = time.monotonic()

    def _send(self, **message: Any) -> None:
        self._send_all(f"{json.dumps(message)}\n")

    def _send_all(self, text: str) -> None:
        """Send a text, one after the other; if that fails the reading finds out why."""
        try:
            with self._sending:
                self._channel.sendall(text.encode())
        except Exception:  # paramiko's exceptions have no common base
            self._channel.close()

    def _read(self) -> None:
        """Hand out what the program says, until it is lost or has been idle for long."""
        pieces: list[bytes] = []
        unasked, heard_at = 0, time.monotonic()
        try:
            while not self._is_over():
                try:
                    data = self._channel.recv(64 * 1024)
                except TimeoutError:
                    if time.monotonic() - heard_at > SILENT_S:
                        raise OSError("it is silent") from None
                    continue
                if not data:
                    raise self._ended()
                heard_at = time.monotonic()
                unasked += len(data)
                pieces.append(data)
                if b"\n" in data:
                    *lines, rest = b"".join(pieces).split(b"\n")
                    pieces = [rest]
                    if sum(self._hand_out(line) for line in lines):
                        unasked = len(rest)
                if unasked > MAX_ANSWER_BYTES:
                    raise OSError(f"it sends more than {MAX_ANSWER_BYTES:,} bytes")
        except LostError as lost:
            self._end(lost)
        except Exception as error:
            self._end(LostError(failure_of(error)))

    def _hand_out(self, line: bytes) -> bool:
        """Hand out a message; return False if nobody waits for it, as for what a .bashrc prints."""
        try:
            message = _Message.model_validate_json(line)
        except ValidationError:
            return False
        with self._lock:
            inbox = self._inboxes.get(message.id)
        if inbox is None:
            return False
        self._has_answered = True
        inbox.put(message)
        return True

    def _ended(self) -> LostError:
        """Return how the program ended, after its output did."""
        if not self._channel.status_event.wait(ANSWER_S):
            return LostError("it does not say how the program ended")
        code = self._channel.recv_exit_status()
        # One that a signal ended has no exit code either, but its output came to an end.
        if code < 0 and not (self._channel.eof_received and self._transport.is_active()):
            return LostError("the connection was over before the program")
        complaint = b""
        while len(complaint) < MAX_ANSWER_BYTES and (data := self._channel.recv_stderr(64 * 1024)):
            complaint += data
        ended = Ended(code, "", complaint.decode(errors="replace"))
        return LostError("the program there ended", ended)

    def _is_over(self) -> bool:
        """Return whether the program is lost; one without work ends now, if it is old or idle for long.

        The end of its connection is left to the reading, which tells why to whoever is about to give it work.
        """
        is_unused = self._is_old or time.monotonic() - self._used_at >= IDLE_S
        with self._lock:
            if is_unused and not self._inboxes and self._lost is None:
                self._lost = LostError("it had no work")
        if self._lost is not None:
            self._client.close()
        return self._lost is not None

    def _end(self, lost: LostError) -> LostError:
        """Tell all who wait that the program is lost; return why, which may have been said before."""
        with self._lock:
            self._lost = lost = self._lost or lost
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.put(lost)
        self._client.close()
        return LostError(str(lost), lost.ended)


def failure_of(error: Exception) -> str:
    """Return in words why a connection failed."""
    # Refused and without a route are both "Unable to connect" to paramiko, which keeps the reason by address.
    by_address = getattr(error, "errors", None)
    first = next(iter(by_address.values()), error) if isinstance(by_address, dict) else error
    return str(first) or type(first).__name__
