"""Python by ssh: programs share a log-in and a process that stands on the server, and both are replaced."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import paramiko
import psutil
import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import (
    LauncherUnreachableError,
    NoAnswerError,
    open_at,
    ssh_standing,
    standing_program,
)
from resource_manager.jobs.launchers.server_library import library_of
from resource_manager.jobs.launchers.slurm import SlurmLauncher
from resource_manager.jobs.launchers.ssh_python import SSHPython
from tests.eventually import wait_for
from tests.ssh_account import logged_in, run_command

OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.7.*/bin/python3"))


class Account:
    """Account whose log-ins are counted."""

    def __init__(self):
        self.logins = []
        self.refuses = False
        self.server = SSHPython("gpu-a", self.log_in)

    def log_in(self):
        self.logins.append(logged_in(self.answer, self.refuses))
        return self.logins[-1]

    def answer(self, channel, command):
        run_command(channel, command)

    def run(self, program="print('done')", timeout_s=30.0, library=""):
        return self.server.run(program, timeout_s, library)

    def standing(self, library=""):
        """Return the process that stands on the server."""
        return psutil.Process(int(self.run("import os; print(os.getppid())", library=library).output))


@pytest.fixture
def account():
    account = Account()
    yield account
    account.server.close()
    for client in account.logins:
        client.close()


@pytest.fixture
def lively(account, monkeypatch):
    """The account, whose standing programs look many times a second whether they should end."""
    monkeypatch.setattr(standing_program, "HEARTBEAT_S", 0.05)
    return account


def is_active(client):
    transport = client.get_transport()
    return transport is not None and transport.is_active()


class TestAProgram:
    def test_answers_with_its_exit_code_and_all_that_it_said(self, account):
        assert account.run("print('a', flush=True); import os; os.system('echo b')") == (0, "a\nb\n", "")
        assert account.run("raise SystemExit(3)").code == 3
        assert account.run("raise SystemExit('why')") == (1, "", "why\n")
        failed = account.run("1 / 0")
        assert (failed.code, failed.complaint.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
        assert account.run("not: Python").complaint.splitlines()[-1].startswith("SyntaxError")

    @pytest.mark.usefixtures("without_a_name")
    def test_of_a_user_without_a_name_needs_one(self):
        with pytest.raises(NoAnswerError, match="no name: set USER to the one to log in as"):
            SSHPython("gpu-a").run("", 1.0)

    def test_knows_its_library_which_is_sent_once(self, account):
        library = "import os\nloaded_in = os.getpid()\ndef loaded():\n    print(loaded_in == os.getppid())"
        for _ in range(3):
            assert account.run("loaded()", library=library) == (0, "True\n", "")
        assert account.run("loaded()").code == 1
        assert len(account.logins) == 2

    def test_changes_nothing_for_the_next(self, account):
        assert (
            account.run("import os, sys; found = 1; os.chdir('/'); sys.stdout.close(); os.close(1)").code == 0
        )
        assert account.run("print('found' in globals(), os)").code == 1

    def test_reads_nothing_of_what_the_others_are_sent(self, account):
        assert account.run("import sys; print(sys.stdin.read())") == (0, "\n", "")

    def test_that_is_killed_says_so(self, account):
        killed = account.run("import os; os.kill(os.getpid(), 9)")
        assert (killed.code, killed.complaint.splitlines()[-1]) == (-9, "its process was ended by signal 9")
        assert account.run().code == 0
        assert len(account.logins) == 1

    def test_takes_its_time_while_others_run(self, account, tmp_path):
        waits = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.02)"
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(account.run, waits) for _ in range(7)]
            for _ in range(20):
                assert account.run() == (0, "done\n", "")
            (tmp_path / "go").touch()
            assert [each.result() for each in waiting] == [(0, "", "")] * 7
        assert len(account.logins) == 1

    def test_that_is_too_slow_is_given_up_and_its_late_answer_too(self, account, tmp_path):
        account.run()
        with pytest.raises(
            LauncherUnreachableError, match=r"does not answer by ssh: no answer within 0.2 s$"
        ):
            account.run(f"import time; time.sleep(0.5); open('{tmp_path}/ran', 'w')", 0.2)
        wait_for((tmp_path / "ran").exists)
        assert account.run() == (0, "done\n", "")
        assert len(account.logins) == 1

    def test_may_say_much(self, account):
        assert len(account.run("print('é' * 1_000_000)").output) == 1_000_001

    def test_goes_on_when_the_connection_is_lost(self, account, tmp_path):
        started, ran = tmp_path / "started", tmp_path / "ran"
        program = f"import time; open('{started}', 'a').write('x'); time.sleep(0.5); open('{ran}', 'w')"
        account.run()
        with ThreadPoolExecutor() as pool:
            running = pool.submit(account.run, program)
            wait_for(started.exists)
            account.logins[0].close()
            assert running.result().code == 0
        assert started.read_text() == "xx", "it was sent again, by another log-in"
        assert ran.exists()

    @pytest.mark.skipif(not OLD_PYTHONS, reason="needs a Python 3.7 of pyenv's")
    def test_runs_on_python_3_7(self, account, tmp_path, monkeypatch):
        (tmp_path / "python3").symlink_to(OLD_PYTHONS[0])
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        library = library_of(*SlurmLauncher.modules)
        assert account.run("print(sys.version_info[:2])", library=library).output == "(3, 7)\n"


class TestTheLogIn:
    def test_is_shared_by_programs_one_after_the_other(self, account):
        assert len({account.standing().pid for _ in range(20)}) == 1
        assert len(account.logins) == 1

    def test_is_waited_for_by_those_who_come_meanwhile(self, account):
        together = Barrier(6)

        def run(_):
            together.wait(30.0)
            account.run()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(run, range(6)))
        assert len(account.logins) == 1

    def test_is_tried_again_after_one_that_failed(self, account, monkeypatch):
        def refuse():
            raise paramiko.AuthenticationException("key refused")

        with monkeypatch.context() as patched:
            patched.setattr(account.server, "_connect", refuse)
            with pytest.raises(NoAnswerError, match="key refused"):
                account.run()
        account.run()

    def test_that_fails_is_told_to_all_who_wait_for_it(self, account):
        """Each would else wait in turn for a server that is out of reach."""
        login: Future[Any] = Future()
        account.server._standing[""] = login
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(account.run) for _ in range(3)]
            login.set_exception(paramiko.AuthenticationException("key refused"))
            for each in waiting:
                with pytest.raises(LauncherUnreachableError, match="does not answer by ssh: key refused"):
                    each.result(30.0)
        del account.server._standing[""]
        assert not account.logins

    def test_whose_session_fails_is_not_tried_again(self, account):
        account.refuses = True
        with pytest.raises(LauncherUnreachableError, match="Administratively prohibited"):
            account.run()
        assert [is_active(client) for client in account.logins] == [False]

    @pytest.mark.parametrize(("extra", "limit_s"), [("{}", 10), ('{"conn_timeout": 3}', 3)])
    @pytest.mark.filterwarnings("ignore")
    def test_by_an_airflow_connection_gives_a_silent_server_up_in_time(self, monkeypatch, extra, limit_s):
        """Airflow's hook waits by itself for as long as TCP does, three times: minutes for each look."""
        limits = []

        def connect(_client, **arguments):
            limits.append(arguments["timeout"])
            raise TimeoutError("timed out")

        monkeypatch.setenv("AIRFLOW_CONN_GPUS", f'{{"conn_type": "ssh", "extra": {extra}}}')
        monkeypatch.setattr(paramiko.SSHClient, "connect", connect)
        place = JobPlace("ssh", f"silent-{limit_s}", "gpus")
        with closing(open_at(place)) as launcher, pytest.raises(NoAnswerError, match="timed out"):
            launcher.status("job")
        assert limits == [limit_s]

    def test_is_replaced_after_the_connection_was_lost(self, account):
        account.run()
        account.logins[0].close()
        account.run()
        assert len(account.logins) == 2

    def test_is_replaced_when_the_server_begins_nothing_any_more(self, account, monkeypatch):
        """As after a restart of the server behind a firewall that drops what it does not know."""
        monkeypatch.setattr(ssh_standing, "ANSWER_S", 0.2)
        account.run()
        transport = account.logins[0].get_transport()
        monkeypatch.setattr(transport, "_send_user_message", lambda message: None)
        assert account.run().output == "done\n"
        assert len(account.logins) == 2
        assert not is_active(account.logins[0])

    def test_is_replaced_when_its_program_was_killed(self, account):
        account.standing().kill()
        assert account.run().output == "done\n"
        assert len(account.logins) == 2

    def test_ends_when_it_was_idle_for_long(self, lively, monkeypatch):
        standing = lively.standing()
        monkeypatch.setattr(ssh_standing, "IDLE_S", 0.2)
        standing.wait(30.0)
        assert not is_active(lively.logins[0])

    def test_is_given_nothing_more_when_it_is_old(self, lively):
        standing = lively.standing()
        lively.server._programs()[0]._opened_at -= ssh_standing.MAX_AGE_S
        lively.run()
        assert len(lively.logins) == 2
        standing.wait(30.0)

    def test_is_lost_when_it_is_silent_for_long(self, lively, monkeypatch):
        with lively.server.lookout("/", LIBRARY, "pass") as lookout:
            standing = lively.standing(LIBRARY)
            standing.suspend()
            monkeypatch.setattr(ssh_standing, "SILENT_S", 0.2)
            with pytest.raises(ssh_standing.LostError, match="it is silent"):
                wait_for(lambda: lookout.changed(0.1))
            standing.kill()

    def test_is_not_used_by_a_process_that_is_forked(self, account):
        account.run()
        process = os.fork()
        if process == 0:
            account.server.disown()
            for client in account.logins:
                client.close()
            os._exit(0)
        os.waitpid(process, 0)
        account.run()
        assert len(account.logins) == 1

    def test_takes_no_notice_of_what_a_shell_prints(self, account):
        def answer(channel, command):
            channel.sendall(b'Welcome\n{"id": 1}x\n{"id": 99, "code": 0}\n[]\n')
            run_command(channel, command)

        account.answer = answer
        assert account.run().output == "done\n"


LIBRARY = library_of()


class TestALookout:
    def test_sees_that_its_program_is_gone(self, account, tmp_path):
        with account.server.lookout(str(tmp_path), LIBRARY, "pass") as lookout:
            (tmp_path / "j").mkdir()
            lookout.watch("j")
            account.standing(LIBRARY).kill()
            with pytest.raises(ssh_standing.LostError, match="ended"):
                wait_for(lambda: lookout.changed(0.1) - {"j"})

    def test_is_refused_where_the_folder_is_another(self, account):
        with (
            pytest.raises(LauncherUnreachableError, match=r"^server gpu-a: ZeroDivisionError"),
            account.server.lookout("/", LIBRARY, "1 / 0"),
        ):
            pass

    def test_that_cannot_see_its_jobs_ends_and_leaves_the_programs(self, account, tmp_path):
        """Some of them look elsewhere, and each program says itself what it cannot see."""
        changes = "def exists(path):\n    raise OSError('Stale file handle')\njob_files.exists = exists\n"
        library = f"{LIBRARY}{changes}"
        with account.server.lookout(str(tmp_path), library, "pass") as lookout:
            lookout.watch("j")
            with pytest.raises(OSError, match="Stale file handle"):
                wait_for(lambda: lookout.changed(0.1))
            assert account.run(library=library).output == "done\n"
        assert len(account.logins) == 1
