"""`with_gpus` of operators whose jobs run on the granted server: a real sshd, a real Docker engine."""

import gc
import os
import signal
import warnings
from base64 import b64decode
from dataclasses import replace
from threading import Event, Thread
from unittest.mock import Mock
from uuid import uuid4

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.providers.ssh.operators.ssh import SSHOperator

    from resource_manager.airflow import with_gpus
    from resource_manager.airflow.leased_operators.kinds import KindElsewhere
    from resource_manager.airflow.task_trigger.waits import LeaseEndTrigger
    from resource_manager.airflow.version_compat import AirflowException, TaskDeferred

from resource_manager.core.models import Gpu, Node
from resource_manager.errors import StoreError, StoreUnavailableError
from resource_manager.jobs import reconcile
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.launchers import LauncherError
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.manager.commit.asking import asked_by
from tests.airflow.tasks import TASK, context_of, fire, interrupted
from tests.e2e.servers import ssh_server
from tests.e2e.test_faults import IMAGE, needs_docker
from tests.eventually import wait_for

__all__ = ["ssh_server"]

pytestmark = pytest.mark.e2e

LIMITS = {"max_runtime": 3, "preempt_grace": 1.5}


@pytest.fixture
def gpu_inventory(ssh_server):
    gpus = tuple(Gpu(n, "A100") for n in range(2))
    engine = os.environ.get("DOCKER_HOST", "127.0.0.1")
    return [
        Node("gpu-a", 0, {"cpus": 64}, gpus, address=f"127.0.0.1:{ssh_server.port}"),
        Node("gpu-b", 1, {"cpus": 64}, gpus, address=engine),
    ]


@pytest.fixture
def train(manager, ssh_server, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_TRAIN", ssh_server.connection)

    def made(command, **arguments):
        operator = with_gpus(SSHOperator, gpus=1)(
            task_id="t", ssh_conn_id="train", command=command, cmd_timeout=20, **arguments
        )
        operator.owner = ""
        return operator

    return made


@pytest.fixture
def context():
    """Function that returns the context of a try; the servers remember jobs that have ended."""
    identity = replace(TASK, run_id=uuid4().hex)

    def of_try(number=1):
        found = context_of(identity, try_number=number)
        return {**found, "task_instance": found["ti"]}

    return of_try


def test_a_command_runs_on_the_granted_server_with_its_devices(train, context, manager):
    command = "echo \"$CUDA_VISIBLE_DEVICES of $GPU_SERVER: $GPU_LEASE_ID 'quoted'\"\necho two"
    result = b64decode(train(command).execute(context())).decode()
    run_id = context()["ti"].run_id
    assert result == f"0 of gpu-a: test:d/{run_id}/t 'quoted'\ntwo\n"
    assert not manager.leases()


def test_without_a_connection_it_logs_in_as_its_account_and_has_no_time_limit(
    context, manager, ssh_server, monkeypatch, tmp_path
):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host 127.0.0.1\n  IdentityFile {ssh_server.key}\n")
    host_key = (ssh_server.home / "host_key.pub").read_text()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{ssh_server.port} {host_key}")
    monkeypatch.setenv("HOME", str(tmp_path))
    operator = with_gpus(SSHOperator, gpus=1)(task_id="t", command="echo on $GPU_SERVER")
    operator.owner = ""
    assert b64decode(operator.execute(context())) == b"on gpu-a\n"
    assert operator.ssh_hook.cmd_timeout is None
    assert not manager.leases()


def test_the_log_says_when_the_operator_of_airflow_ends_a_command_after_seconds(train, context, capsys):
    limit = "cmd_timeout ends this command after 10 s"
    train("true").execute(context())
    assert limit not in capsys.readouterr().out
    operator = with_gpus(SSHOperator, gpus=1)(task_id="t", ssh_conn_id="train", command="true")
    operator.owner = ""
    operator.execute(context(2))
    assert limit in capsys.readouterr().out


def test_a_command_that_fails_releases_its_gpus_and_has_its_exit_code(train, context, manager):
    with pytest.raises(AirflowException, match="exit status = 3"):
        train("exit 3").execute(context())
    assert not manager.leases()
    end = manager.history(0)[-1]
    assert (end["outcome"], end["reason"]) == ("FAILED", "exit code 3")


def test_the_log_of_a_command_that_somebody_stopped_names_them(train, context, manager, monkeypatch, capsys):
    def stop():
        with asked_by("ada"):
            manager.release(manager.leases()[0]["task_id"], job_end="gone", reason="stopped")

    interrupted(monkeypatch, GangJob, "is_gone", "before", stop, None)
    with pytest.raises(AirflowException, match="exit status = 143"):
        train("exit 143").execute(context())
    assert "its command was stopped: ada released its lease: stopped" in capsys.readouterr().out


def test_a_command_is_ended_before_its_worker_once_its_lease_is_lost(
    train, context, manager, at_worker_kill, tmp_path
):
    """As after a reset, or by a release of an operator who is wrong: its GPUs may be another task's."""
    ended = Event()

    @at_worker_kill
    def kill_worker(how):
        if not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}"):
            ended.set()

    def lose():
        wait_for((tmp_path / "begun").exists)
        manager.release(manager.leases()[0]["task_id"], job_end="gone", reason="by mistake")

    losing = Thread(target=lose)
    losing.start()
    command = f"echo $$ > {tmp_path}/pid; touch {tmp_path}/begun; exec sleep 60"
    with pytest.raises(AirflowException, match="exit status"):
        train(command, gpu_demand={"ttl": 4}).execute(context())
    assert ended.wait(20)
    losing.join()
    assert "by mistake" in str(manager.history(0)[-1])


@pytest.mark.parametrize("signal_name", ["TERM", "USR2"])
def test_a_command_whose_lease_is_taken_is_told_and_saves_what_it_did(
    train, context, manager, at_worker_kill, tmp_path, signal_name
):
    signals: list[int] = []
    at_worker_kill(signals.append)

    def take():
        wait_for((tmp_path / "begun").exists)
        manager.submit("urgent", 1, 1, server="gpu-a", priority=9, expected_runtime=60)
        manager.preempt(manager.leases()[0]["task_id"], preemptor="urgent")

    taking = Thread(target=take)
    taking.start()
    saves = f"read grace < $GPU_PREEMPT_FILE; echo $grace > {tmp_path}/saved; exit 7"
    command = f"trap '{saves}' {signal_name}; touch {tmp_path}/begun; while :; do sleep 0.1; done"
    demand = {"ttl": 2, "preemptible": True, "preempt_grace": 50, "preempt_signal": signal_name}
    with pytest.raises(AirflowException, match="exit status = 7"):
        train(command, gpu_demand={"gpus": 2, **demand}).execute(context())
    taking.join()
    assert 25 <= float((tmp_path / "saved").read_text()) <= 50
    assert not signals, "the worker waits for the command"
    assert not [lease for lease in manager.leases() if lease["task_id"] != "urgent"]
    [end] = [event for event in manager.history(0) if "outcome" in event]
    assert (end["outcome"], end["reason"]) == ("FAILED", "exit code 7")


def test_a_command_that_ignores_that_its_lease_is_taken_is_killed_after_its_grace(
    train, context, manager, at_worker_kill
):
    signals: list[int] = []
    at_worker_kill(signals.append)
    with pytest.raises(AirflowException, match="exit status"):
        train("trap '' TERM; while :; do sleep 0.1; done", gpu_demand={"ttl": 2, **LIMITS}).execute(context())
    assert not signals
    assert not manager.leases()
    assert manager.history(0)[-1]["outcome"] == "TIMED_OUT"


def left_behind(train, context, tmp_path):
    """Run a command whose connection is given up while it runs; return the pid of what it goes on with."""
    operator = train(f"echo $$ > {tmp_path}/pid; exec sleep 60")
    operator.cmd_timeout = 2
    with pytest.raises(Exception, match="SSH command timed out"):
        operator.execute(context())
    return int((tmp_path / "pid").read_text())


def test_gpus_stay_allocated_while_a_command_lives_that_its_task_has_lost(train, context, manager, tmp_path):
    pid = left_behind(train, context, tmp_path)
    [lease] = manager.leases()
    with pytest.raises(TaskDeferred) as deferred:
        train("echo again").execute(context(2))
    assert isinstance(deferred.value.trigger, LeaseEndTrigger)
    fire(deferred.value.trigger, meanwhile=lambda: os.kill(pid, signal.SIGKILL))
    again = getattr(train("echo again"), deferred.value.method_name)
    assert b64decode(again(context(2), {})) == b"again\n"
    assert not manager.leases()
    assert manager.history(0)[-1]["fencing_token"] > lease["fencing_token"]


def test_the_reconciler_ends_a_command_whose_task_has_ended(train, context, manager, tmp_path):
    pid = left_behind(train, context, tmp_path)
    [lease] = manager.leases()
    assert reconcile.end(manager, lease).action is reconcile.ActionKind.RELEASED
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_what_a_command_leaves_in_the_background_keeps_the_gpus(train, context, manager, tmp_path):
    train(f"setsid sleep 60 >/dev/null 2>&1 & echo $! > {tmp_path}/pid").execute(context())
    [lease] = manager.leases()
    assert reconcile.end(manager, lease).action is reconcile.ActionKind.RELEASED
    pid = (tmp_path / "pid").read_text().strip()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_server_out_of_reach_frees_the_gpus_at_once_and_is_avoided(
    train, context, manager, ssh_server, monkeypatch
):
    # A connection of its own: the log-ins by that of the other tests are kept for a minute.
    monkeypatch.setenv("AIRFLOW_CONN_NOBODY", ssh_server.connection.replace('"root"', '"nobody"'))
    operator = train("true")
    operator.ssh_conn_id = "nobody"
    with pytest.raises(AirflowException, match="does not answer by ssh"):
        operator.execute(context())
    assert not manager.leases()
    assert manager.history(0)[-1]["reason"]


@pytest.mark.parametrize(
    ("command", "answers", "error"), [("true", False, StoreUnavailableError), (7, True, AttributeError)]
)
def test_a_job_that_is_placed_and_not_started_leaves_no_lease(
    train, context, manager, connect, pause, command, answers, error
):
    """Its lease is quarantined rather than expired: nobody would free its GPUs."""
    pause({"airflow.leased_operators.kinds.PATIENCE_S": 0.0, "manager.patience.ASK_AGAIN_S": 0.0})

    def placed(*arguments, **options):
        lease = manager.place_job(*arguments, **options)
        if not answers:
            raise StoreUnavailableError("no answer")
        return lease

    connect(Mock(wraps=manager, place_job=placed))
    with pytest.raises(error):
        train(command).execute(context())
    assert not manager.leases()
    assert manager.history(0)[-1]["reason"] == error.__name__


def test_a_place_whose_answer_is_lost_is_stored_again(train, context, manager, connect, pause):
    pause({"manager.patience.ASK_AGAIN_S": 0.0})
    lost = iter([StoreUnavailableError("no answer")])

    def placed(*arguments, **options):
        lease = manager.place_job(*arguments, **options)
        for error in lost:
            raise error
        return lease

    connect(Mock(wraps=manager, place_job=placed))
    train("true").execute(context())
    assert not manager.leases()
    assert manager.history(0)[-1]["outcome"] == "SUCCESS"


def test_a_store_that_fails_too_does_not_hide_why_a_job_was_not_started(
    train, context, manager, connect, launch_by, capsys
):
    prepare = Mock(side_effect=LauncherError("no disk is left"))
    launch_by(lambda place: Mock(spec=SSHLauncher, prepare=prepare), "ssh")
    connect(Mock(wraps=manager, release=Mock(side_effect=StoreError("the store is read-only"))))
    with pytest.raises(AirflowException, match="no disk is left"):
        train("true").execute(context())
    assert "the lease was not released" in capsys.readouterr().out


class Died(Exception):
    pass


@pytest.fixture
def collects_garbage():
    """Collect what the test leaves before the next one begins, which would be warned of it."""
    yield
    gc.collect()


# DockerOperator leaves the socket open by which it follows the output.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collects_garbage")
@needs_docker
@pytest.mark.parametrize(
    ("auto_remove", "command", "stays"),
    [
        ("never", "true", True),
        ("success", "true", False),
        ("success", "false", True),
        ("force", "false", False),
    ],
)
def test_a_container_whose_worker_died_is_removed_as_its_operator_says(
    manager, context, monkeypatch, auto_remove, command, stays
):
    from airflow.providers.docker.operators.docker import DockerOperator

    class OnEngineWithoutGPUs(DockerOperator):
        def execute(self, context):
            self.device_requests = None
            return super().execute(context)

    def task(command):
        return with_gpus(OnEngineWithoutGPUs, gpus=1, server="gpu-b")(
            task_id="t", image=IMAGE, command=command, auto_remove=auto_remove, mount_tmp_dir=False, owner=""
        )

    def dies(context):
        raise Died

    dead, again = task(command), task("true")
    with monkeypatch.context() as patched:
        patched.setattr(dead, "work", dies)
        patched.setattr(KindElsewhere, "end", lambda *arguments: False)
        with pytest.raises(Died):
            dead.execute(context())
    engine, labels = dead.cli, dead.labels
    left = engine.create_container(IMAGE, command, name=dead.container_name, labels=labels)["Id"]
    engine.start(left)
    engine.wait(left)
    try:
        again.execute(context(2))
        assert (left in {each["Id"] for each in engine.containers(all=True)}) is stays
    finally:
        own = f"gpu-manager.run_id={labels['gpu-manager.run_id']}"
        for each in engine.containers(all=True, filters={"label": own}):
            engine.remove_container(each["Id"], force=True)
        engine.close(), again.cli.close()
