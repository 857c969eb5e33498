"""Account on a server, reached by ssh over a pair of sockets of this process."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import IO

import paramiko

Act = Callable[[paramiko.Channel, str], None]


class _Account(paramiko.ServerInterface):
    def __init__(self, act: Act, refuses: bool) -> None:
        self._act, self._refuses = act, refuses

    def check_auth_password(self, username: str, password: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED if self._refuses else paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        Thread(target=self._answer, args=(channel, command.decode()), daemon=True).start()
        return True

    def _answer(self, channel: paramiko.Channel, command: str) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):  # the client has gone
            self._act(channel, command)


def logged_in(act: Act, refuses: bool = False) -> paramiko.SSHClient:
    """Return a client whose commands `act` answers, in a thread for each; or that may open no session."""
    here, there = socket.socketpair()
    server = paramiko.Transport(there)
    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(Event(), _Account(act, refuses))  # an event: it does not wait for the client
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
    client.connect("server", username="u", password="p", sock=here, allow_agent=False, look_for_keys=False)
    return client


def run_command(channel: paramiko.Channel, command: str) -> None:
    """Run the command as a login shell does, with the channel as its standard streams."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    Thread(target=_feed, args=(channel, process.stdin), daemon=True).start()
    complaint = Thread(target=_copy, args=(process.stderr, channel.sendall_stderr), daemon=True)
    complaint.start()
    _copy(process.stdout, channel.sendall)
    complaint.join()
    if (code := process.wait()) >= 0:
        channel.send_exit_status(code)
    channel.close()


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    with suppress(OSError), stdin:
        while data := channel.recv(65536):
            stdin.write(data)
            stdin.flush()


def _copy(stream: IO[bytes], send: Callable[[bytes], None]) -> None:
    with suppress(OSError, EOFError), stream:
        while data := stream.read1(65536):  # type: ignore[attr-defined]
            send(data)
