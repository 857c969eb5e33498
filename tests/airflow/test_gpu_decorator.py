"""`@task.gpu`: its server, its renewals and its release."""

import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from resource_manager.jobs.launchers.terminal import OWN_SERVER
from tests.builders import Clock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    try:  # since 3.2
        from airflow.sdk.exceptions import AirflowSkipException
    except ImportError:
        from airflow.exceptions import AirflowSkipException  # type: ignore[no-redef]
    from airflow.sdk import DAG, task

    from resource_manager.airflow import lease_renewal, worker_guard
    from resource_manager.airflow.decorators import gpu
    from resource_manager.airflow.version_compat import AirflowFailException

from resource_manager.agent.probe import registered_job
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.jobs.launchers.base import job_key
from resource_manager.manager.recorded_changes import LEASE_GONE
from tests.agent.reporting import server
from tests.airflow.asking import ask, report_of
from tests.airflow.tasks import TASK, context_of
from tests.eventually import wait_for


def made(function, **arguments):
    """Return the operator of a `@task.gpu` function."""
    return gpu.GPUDecoratedOperator(
        task_id="t", gpus=2, python_callable=function, op_args=[], op_kwargs={}, **arguments
    )


def test_a_child_that_ends_meanwhile_keeps_no_process_from_its_end(at_worker_kill, capsys):
    child = subprocess.Popen(["true"])
    ended = psutil.Process(child.pid)
    child.wait()
    killed: list[int] = []
    at_worker_kill(killed.append, [ended])
    worker_guard.end_this_process("its lease is over")
    assert killed == [signal.SIGKILL]


def test_a_function_asks_for_its_further_resources_mapped_or_not():
    """Airflow has a parameter of that name, with other keys, and reads it where a function is mapped."""
    memory, less = {"memory_mib": 65536}, {"memory_mib": 1}

    def train(x): ...

    leased: Any = task.gpu(gpus=1, resources=memory)(train)
    with DAG("d", schedule=None) as dag:
        leased(1)
        leased.override(task_id="less", resources=less)(1)
        leased.override(task_id="mapped").expand(x=[1, 2])
    mapped: Any = dag.get_task("mapped").unmap({"op_kwargs": {"x": 1}})
    given: list[Any] = [dag.get_task("train"), dag.get_task("less"), mapped]
    assert [one.given_fields()["resources"] for one in given] == [memory, less, memory]
    with pytest.raises(ValueError, match="resources"):
        task.gpu(gpus=1, resources={"memory_mib": -1})(train)


def test_a_function_for_one_server_is_not_run_by_the_worker_of_another(monkeypatch, manager):
    def server_of(wanted):
        def here():
            [lease] = manager.leases()
            return lease["server_name"]

        return made(here, server=wanted).execute(context_of())

    assert [server_of(wanted) for wanted in (None, "gpu-server-3")] == ["gpu-server-0", "gpu-server-3"]
    monkeypatch.setenv(OWN_SERVER, "gpu-server-2")
    assert [server_of(one) for one in (None, "gpu-server-2", 2, " 2 ")] == ["gpu-server-2"] * 4
    with pytest.raises(AirflowFailException, match="requires server 1, but this worker is on 'gpu-server-2'"):
        server_of(1)


@pytest.mark.parametrize("ttl", [90, "90", "90s", "1.5min", timedelta(seconds=90)])
def test_a_ttl_is_seconds_a_timedelta_or_a_text(manager, ttl):
    def here():
        [lease] = manager.leases()
        return lease["expires_at"] - lease["granted_at"]

    assert made(here, ttl=ttl).execute(context_of()) == pytest.approx(90, abs=30)


@pytest.mark.skipif(sys.platform != "linux", reason="processes register themselves on Linux")
def test_the_function_and_what_it_starts_are_known_as_the_leases_job(manager):
    def owners():
        [lease] = manager.leases()
        inherited = subprocess.check_output(["printenv", "GPU_LEASE_ID"], text=True)
        return lease, registered_job(os.getpid()), inherited.strip()

    lease, registered, inherited = made(owners).execute(context_of())
    assert registered == job_key(lease["task_id"], lease["fencing_token"])
    assert inherited == lease["task_id"]


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_a_function_whose_gpus_compute_nothing_is_told_so_in_its_log(manager, idle_told, capfd):
    def compute_nothing():
        report_of(manager, utilization_percent=0)
        wait_for(idle_told.is_set)

    made(compute_nothing, idle_after=1e-6).execute(context_of())
    assert capfd.readouterr().out.count("have computed nothing for") == 1


@pytest.fixture
def ends():
    """Queue of the reasons for which a `@task.gpu` would have ended its process."""
    said: queue.Queue[str] = queue.Queue()
    return said


@pytest.mark.thorough
def test_a_process_ends_before_its_lease_if_a_renewal_hangs(ends):
    answers, hangs = iter(["renewed"]), threading.Event()
    service: Any = SimpleNamespace(renew=lambda *_, **__: next(answers, None) or hangs.wait(20))
    with lease_renewal.kept_alive(service, "t", 1, 2.0, end=ends.put):
        assert ends.get(timeout=10) == "the lease could not be renewed: no answer"
    hangs.set()


def test_a_process_ends_if_renewals_fail(ends):
    asked, clock = itertools.count(), Clock()

    def renew(*_, **__):
        number = next(asked)
        if number == 2:  # the error of the renewal before is stored by now
            clock.now += 1.0
        if number:
            raise OSError("no file is left")

    service: Any = SimpleNamespace(renew=renew)
    with lease_renewal.kept_alive(service, "t", 1, 0.2, clock=clock, end=ends.put):
        assert ends.get(timeout=30) == "the lease could not be renewed: no file is left"


@pytest.mark.parametrize(
    ("ttl_s", "grace_s", "pauses"),
    [(60.0, 60.0, [15.0, 3.75]), (3600.0, 3600.0, [40.0, 10.0]), (120.0, 12.0, [4.0, 1.0])],
)
def test_a_renewal_that_failed_is_made_again_sooner(ends, monkeypatch, ttl_s, grace_s, pauses):
    """One is made in each recovery window, too, so that a lease that was lost is missed in it.

    So is one in the grace of a lease that a limit ends: it is over with that.
    """
    waits: list[float] = []
    answers = iter([{}, OSError("hangs"), LeaseNotFoundError("t")])

    class Over(threading.Event):
        def wait(self, timeout=None):
            if threading.current_thread().name != "gpu-lease":
                return super().wait(timeout)
            waits.append(timeout)
            return False

    def renew(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(lease_renewal, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
    service: Any = SimpleNamespace(renew=renew)
    with lease_renewal.kept_alive(service, "t", 1, ttl_s, grace_s=grace_s, end=ends.put):
        assert ends.get(timeout=30) == LEASE_GONE
    assert waits == pauses, "so that one call that hangs for 15 s leaves time for another"


def test_a_process_ends_if_one_of_its_gpus_failed(ends):
    service: Any = SimpleNamespace(renew=lambda *_, **__: {"gpu_failed": "xid 79"})
    with lease_renewal.kept_alive(service, "t", 1, 0.2, end=ends.put):
        assert ends.get(timeout=30) == "one of its GPUs failed: xid 79"


def test_a_process_whose_lease_is_taken_gets_its_signal_and_is_ended_after_its_grace(
    manager, ends, at_worker_kill
):
    told: list[int] = []
    at_worker_kill(told.append)
    lease = ask(manager, TASK, 2, preemptible=True, preempt_grace=0.5)
    manager.submit("urgent", 8, 1, server=lease["server_name"], priority=9, expected_runtime=60)
    manager.preempt(TASK.lease_id, preemptor="urgent")
    with lease_renewal.kept_alive(manager, TASK.lease_id, lease["fencing_token"], 0.2, end=ends.put):
        assert ends.get(timeout=30) == "the lease was taken, and the time to save is over"
    assert told == [signal.SIGTERM]


def test_a_pending_renewal_does_not_end_a_process_that_released_its_lease(ends):
    answers, asked, released, answered = iter([None]), *(threading.Event() for _ in range(3))

    def renew(*_, **__):
        if next(answers, "over") == "over":
            asked.set()
            released.wait(30)
            answered.set()
            raise LeaseNotFoundError("t")

    service: Any = SimpleNamespace(renew=renew)
    with lease_renewal.kept_alive(service, "t", 1, 0.2, clock=Clock(), end=ends.put):  # it does not run out
        assert asked.wait(30)
    released.set()
    assert answered.wait(30)
    time.sleep(0.1)
    assert ends.empty()


@pytest.mark.parametrize("ends_with", [None, AirflowSkipException("nothing to do")])
def test_a_failed_release_does_not_change_the_result_of_the_function(manager, connect, ends_with):
    def act():
        if ends_with:
            raise ends_with
        return "trained"

    def fail(*_, **__):
        raise ResourceManagerError("the store is out")

    connect(Mock(wraps=manager, release=fail))
    with pytest.raises(AirflowSkipException) if ends_with else nullcontext():
        assert made(act).execute(context_of()) == "trained"
    assert len(manager.leases()) == 1
