"""Connections by ssh that stay open: commands share a log-in, and one that was lost is replaced."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import paramiko
import pytest

from resource_manager.jobs.launchers import LauncherUnreachableError, ssh_connections
from resource_manager.jobs.launchers.ssh import SSHPython
from resource_manager.jobs.launchers.ssh_connections import SSHConnections
from tests.ssh_account import logged_in


class Account:
    """Account whose log-ins are counted, and whose commands all end well."""

    def __init__(self):
        self.logins = []
        self.connections = SSHConnections("gpu-a", self.log_in)
        self.server = SSHPython("gpu-a", shared=self.connections)

    def log_in(self):
        self.logins.append(logged_in(self.answer))
        return self.logins[-1]

    @staticmethod
    def answer(channel, command):
        channel.makefile("rb").read()
        channel.sendall(b"done")
        channel.send_exit_status(0)
        channel.close()

    def run(self):
        assert self.server.run("pass", 30.0) == (0, "done", "")


@pytest.fixture
def account():
    account = Account()
    yield account
    account.connections.close()
    for client in account.logins:
        client.close()


def is_active(client):
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def test_commands_one_after_the_other_share_a_log_in(account):
    for _ in range(20):
        account.run()
        account.server.close()  # as each launcher does: others use the connection
    assert len(account.logins) == 1


def test_commands_at_once_share_log_ins_by_as_many_as_a_server_allows(account):
    with ExitStack() as sessions:
        for count in range(1, 2 * ssh_connections.MAX_SESSIONS + 1):
            sessions.enter_context(account.connections.session())
            assert len(account.logins) == -(-count // ssh_connections.MAX_SESSIONS)


def test_those_who_come_during_a_log_in_wait_for_it(account):
    together = Barrier(6)

    def run(_):
        together.wait(30.0)
        account.run()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))
    assert len(account.logins) == 1


def test_a_log_in_that_fails_is_told_to_all_who_wait_for_it(account):
    """Each would else wait in turn for a server that is out of reach."""
    account.connections._login = login = Future()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(account.run) for _ in range(3)]
        login.set_exception(paramiko.AuthenticationException("key refused"))
        for each in waiting:
            with pytest.raises(LauncherUnreachableError, match="does not answer by ssh: key refused"):
                each.result(30.0)
    assert not account.logins


def test_a_log_in_after_one_that_failed_is_tried(account, monkeypatch):
    def refuse():
        raise paramiko.AuthenticationException("key refused")

    with monkeypatch.context() as patched:
        patched.setattr(account.connections, "_connect", refuse)
        with pytest.raises(LauncherUnreachableError, match="key refused"):
            account.run()
    account.run()


def test_a_connection_that_was_lost_while_idle_is_replaced(account):
    account.run()
    account.logins[0].close()
    account.run()
    assert len(account.logins) == 2


def test_a_connection_that_opens_no_session_is_replaced(account, monkeypatch):
    """As after a restart of the server behind a firewall that drops what it does not know."""
    monkeypatch.setattr(ssh_connections, "OPEN_TIMEOUT_S", 0.1)
    account.run()
    transport = account.logins[0].get_transport()
    monkeypatch.setattr(transport, "_send_user_message", lambda message: None)
    account.run()
    assert len(account.logins) == 2
    assert not is_active(account.logins[0])


def test_a_server_that_allows_fewer_sessions_is_logged_in_to_again(account, monkeypatch):
    with account.connections.session():

        def refuse(*_, **__):
            raise paramiko.ChannelException(1, "Administratively prohibited")

        monkeypatch.setattr(account.logins[0].get_transport(), "open_session", refuse)
        account.run()
        assert [is_active(client) for client in account.logins] == [True, True]
    assert [is_active(client) for client in account.logins] == [False, True]


def test_a_log_in_whose_first_session_fails_is_not_tried_again(account, monkeypatch):
    def refuse(*_, **__):
        raise paramiko.ChannelException(1, "Administratively prohibited")

    monkeypatch.setattr(paramiko.Transport, "open_session", refuse)
    with pytest.raises(LauncherUnreachableError, match="Administratively prohibited"):
        account.run()
    assert len(account.logins) == 1
    assert not account.connections.is_open


def test_after_an_error_the_others_on_the_connection_go_on_and_new_ones_log_in(account):
    with account.connections.session() as other:
        with pytest.raises(ZeroDivisionError), account.connections.session():
            _ = 1 / 0
        account.run()
        assert len(account.logins) == 2
        assert not other.closed
    assert not is_active(account.logins[0])


def test_an_idle_connection_is_closed(account, monkeypatch):
    monkeypatch.setattr(ssh_connections, "IDLE_S", 0.05)
    account.run()
    transport = account.logins[0].get_transport()
    transport.join(30.0)
    assert not transport.is_alive()
    assert not account.connections.is_open


def test_an_old_connection_takes_no_further_sessions(account, monkeypatch):
    account.run()
    monkeypatch.setattr(ssh_connections, "MAX_AGE_S", 0.0)
    account.run()
    assert len(account.logins) == 2
    assert not is_active(account.logins[0])
