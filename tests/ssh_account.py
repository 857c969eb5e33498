"""Account on a server, reached by ssh over a pair of sockets of this process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

import paramiko

Act = Callable[[paramiko.Channel, str], None]


class _Account(paramiko.ServerInterface):
    def __init__(self, act: Act) -> None:
        self._act = act

    def check_auth_password(self, username: str, password: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        Thread(target=self._answer, args=(channel, command.decode()), daemon=True).start()
        return True

    def _answer(self, channel: paramiko.Channel, command: str) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):  # the client has gone
            self._act(channel, command)


def logged_in(act: Act) -> paramiko.SSHClient:
    """Return a client whose commands `act` answers, in a thread for each."""
    here, there = socket.socketpair()
    server = paramiko.Transport(there)
    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(Event(), _Account(act))  # an event: it does not wait for the client
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
    client.connect("server", username="u", password="p", sock=here, allow_agent=False, look_for_keys=False)
    return client
