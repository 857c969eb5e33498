"""Gangs as operators ask for them: starts, attempts, ends, and what stays of a server out of reach."""

import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk import DAG

    from resource_manager.airflow import GPUTrainingOperator, gpu_lease, listener
    from resource_manager.airflow.decorators.gpu import gpu_task
    from resource_manager.airflow.task_results import keep_end
    from resource_manager.airflow.task_trigger.events import EndState, TaskEnd
    from resource_manager.airflow.version_compat import AirflowException, AirflowFailException

from resource_manager.core.models import Gpu, JobPlace, Node
from resource_manager.jobs.launchers import (
    LauncherError,
    LauncherUnreachableError,
    job_key,
    registry,
)
from resource_manager.jobs.launchers.fake import FakeLauncher
from resource_manager.jobs.reconcile import reconcile
from resource_manager.jobs.running_job import RunningJob
from tests.airflow.tasks import TASK, again, asked, context_of, fire, until
from tests.eventually import wait_for
from tests.jobs.test_reconcile import States

SERVERS = [
    Node(f"gpu-{number}", number, {"cpus": 8}, tuple(Gpu(gpu) for gpu in range(4)), f"10.0.0.{number + 1}")
    for number in range(4)
]
WANTED = {"nodes": 3, "gpus": 4, "command": "train", "retries": 1}


@pytest.fixture
def gpu_inventory():
    return SERVERS


class Servers(FakeLauncher):
    """Servers by address, of which some refuse to prepare or start, or are out of reach."""

    def __init__(self):
        super().__init__()
        self.out_of_reach = set()
        self.refuse = {}
        self.calls = []

    def forget(self, key):
        del self._present[key]

    def at(self, address):
        return _Server(self, address)


class _Server:
    def __init__(self, servers, address):
        self._servers, self._address = servers, address

    def __getattr__(self, name):
        if name == "close":
            return lambda: None
        if self._address in self._servers.out_of_reach:
            raise LauncherUnreachableError(f"{self._address} does not answer")
        self._servers.calls.append((name, self._address))
        if self._servers.refuse.get(self._address) == name:
            raise LauncherError(f"no space on {self._address}")
        if name == "prepare":
            return lambda job: replace(self._servers.prepare(job), address=self._address)
        return getattr(self._servers, name)


@pytest.fixture
def servers(manager, launch_by, fast_triggers, notes, wanted, pause, monkeypatch):
    servers = Servers()
    launch_by(lambda place: servers.at(place.address))
    for name in [*registry.SIGNALS]:  # a thread would call the addresses by ssh, long afterwards
        monkeypatch.delitem(registry.SIGNALS, name)
    pause({"airflow.task_trigger.trigger.START_PAUSE_S": 0.05})
    return servers


def started(servers, operator, jobs=3):
    """Run the task's trigger until that many jobs run and it has noted their start; return it."""
    servers.runs("train")
    asks = asked(operator)
    until(asks, lambda: len(servers.running()) == jobs and "logs" in {act for act, _ in servers.calls})
    return asks


def train(**arguments):
    return GPUTrainingOperator(task_id="t", **{**WANTED, "launcher": "ssh", **arguments})


def test_every_member_starts_with_its_rank_and_its_own_gpus(manager, servers):
    started(servers, train(env={"LR": 0.1}))
    jobs = sorted(servers.jobs, key=lambda job: job.key)
    [lease] = manager.leases()
    assert [job.key for job in jobs] == [
        job_key(TASK.lease_id, lease["fencing_token"], rank, 3) for rank in range(3)
    ]
    assert [job.environment["GPU_SERVER"] for job in jobs] == ["gpu-0", "gpu-1", "gpu-2"]
    assert [job.environment["GPU_NODE_RANK"] for job in jobs] == ["0", "1", "2"]
    assert {job.environment["MASTER_ADDR"] for job in jobs} == {"10.0.0.1"}
    assert {job.environment["MASTER_PORT"] for job in jobs} == {str(lease["members"][0]["port"])}
    assert {job.environment["LR"] for job in jobs} == {"0.1"}
    assert [job.port for job in jobs] == [lease["members"][0]["port"], 0, 0]
    assert jobs[0].files == {"GPU_HOSTFILE": "10.0.0.1 slots=4\n10.0.0.2 slots=4\n10.0.0.3 slots=4\n"}
    phases = [name for name, _ in servers.calls]
    assert phases.index("start") > max(i for i, name in enumerate(phases) if name == "prepare")


def test_a_job_of_one_server_gets_nothing_of_a_gang(manager, servers):
    started(servers, train(nodes=None), jobs=1)
    [job] = servers.jobs
    gang = ("PET_", "MASTER_", "GPU_NODE", "GPU_MASTER", "GPU_HOSTFILE", "GLOO_", "NCCL_")
    assert not [name for name in job.environment if name.startswith(gang)]
    assert (job.files, job.port, job.container) == ({}, 0, {})


def test_containers_of_a_gang_share_the_network_of_their_server(manager, servers):
    started(servers, train(image="torch", launcher="docker"))
    assert {job.container["network_mode"] for job in servers.jobs} == {"host"}


def test_the_next_try_finds_the_same_gang_and_starts_what_is_missing(manager, servers, notes):
    started(servers, train())
    [before] = manager.leases()
    keys = [job.key for job in servers.jobs]
    servers.forget(keys[2])  # as if the triggerer had been killed before that start
    notes.clear()
    started(servers, train())
    [after] = manager.leases()
    assert (after["fencing_token"], after["members"]) == (before["fencing_token"], before["members"])
    assert sorted(job.key for job in servers.jobs) == sorted([*keys, keys[2]])


def test_a_start_that_fails_ends_what_started_and_queues_again_after_a_pause(manager, servers, notes):
    servers.refuse["10.0.0.2"] = "start"
    servers.runs("train")
    asks = asked(train(start_attempts=2))
    until(asks, lambda: notes.get("gpu_task", {}).get("attempt") == 2)
    assert {job.key for job in servers.stopped} == {job.key for job in servers.jobs}
    servers.refuse.clear()
    until(again(asks), lambda: len(servers.running()) == 3)
    [lease] = manager.leases()
    assert (lease["labels"]["start_attempt"], lease["fencing_token"]) == ("2", 2)


def test_the_last_attempt_names_the_server(manager, servers):
    servers.refuse["10.0.0.2"] = "prepare"
    operator = train(start_attempts=2, nodes=4)
    event = fire(asked(operator))
    with pytest.raises(AirflowException) as failed:
        operator.execute_ended(context_of(), event)
    assert str(failed.value) == (
        "the gang did not start in 2 attempts (start_attempts): rank 1 on gpu-1: no space on 10.0.0.2"
    )
    assert manager.leases() == []
    assert servers.jobs == []


@pytest.mark.parametrize("goes_on", ["this triggerer", "the next one"])
def test_a_later_request_of_a_gang_that_somebody_cancels_ends_its_try(manager, servers, goes_on):
    servers.refuse["10.0.0.2"] = "prepare"
    asks = asked(train(start_attempts=3, nodes=4))
    manager.submit("other", 4, 1, nodes=4)  # granted before the gang asks again

    def is_second():
        return [each["labels"].get("start_attempt") for each in manager.queue()] == ["2"]

    def cancel():
        wait_for(is_second)
        manager.cancel(TASK.lease_id, reason="not today")

    if goes_on == "the next one":
        until(asks, is_second)
        asks = again(asks)
    event = fire(asks, cancel)
    assert event["detail"] == f"{manager.history()[-1]['by']} cancelled its request: not today"
    assert manager.queue() == []


def test_the_next_attempt_avoids_the_server_that_did_not_start(manager, servers):
    servers.refuse["10.0.0.2"] = "prepare"
    started(servers, train(start_attempts=2))
    [lease] = manager.leases()
    assert [member["server_name"] for member in lease["members"]] == ["gpu-0", "gpu-2", "gpu-3"]


def test_a_restart_of_the_triggerer_keeps_a_gang_of_which_a_server_is_out_of_reach(manager, servers):
    asks = started(servers, train())
    servers.out_of_reach.add("10.0.0.3")
    looked = len(servers.calls)
    until(again(asks), lambda: len(servers.calls) > looked + 20)
    [lease] = manager.leases()
    assert (lease["state"], len(lease["members"])) == ("RUNNING", 3)
    assert servers.stopped == []


def test_a_server_out_of_reach_keeps_its_part_and_the_next_gang_avoids_it(manager, servers, notes):
    operator = train(unreachable_timeout=timedelta(seconds=0.05))
    asks = started(servers, operator)
    servers.out_of_reach.add("10.0.0.3")
    event = fire(again(asks))
    with pytest.raises(AirflowException, match=r"rank 2 is out of reach: 10\.0\.0\.3 does not answer"):
        operator.execute_ended(context_of(), event)
    [rest] = manager.leases()
    assert (rest["state"], [member["rank"] for member in rest["members"]]) == ("ERROR", [2])
    notes.clear()
    started(servers, train(), jobs=4)
    _, again_granted = manager.leases()
    assert [member["server_name"] for member in again_granted["members"]] == ["gpu-0", "gpu-1", "gpu-3"]
    assert reconciled(manager) == [("kept", 2)]
    servers.out_of_reach.clear()
    assert reconciled(manager) == [("released", 1)]
    [left] = manager.leases()
    assert left["fencing_token"] == again_granted["fencing_token"]


def reconciled(manager):
    """Return the actions of the reconciler while the task goes on, and the number of leases after it."""
    done = reconcile(manager, States(unfinished=[TASK]), TASK.instance)
    return [(str(action.action), len(manager.leases())) for action in done.actions]


def test_a_gang_out_of_reach_as_a_whole_stays_as_it_is(manager, servers, notes):
    operator = train(unreachable_timeout=timedelta(seconds=0.05))
    asks = started(servers, operator)
    servers.out_of_reach.update(node.address for node in SERVERS)
    event = fire(again(asks))
    assert "its GPUs stay allocated" in event["detail"]
    [lease] = manager.leases()
    assert len(lease["members"]) == 3
    servers.out_of_reach.clear()
    notes.clear()
    started(servers, train())
    assert manager.leases()[0]["fencing_token"] == lease["fencing_token"]


def test_a_failed_member_fails_the_task_with_its_rank_and_last_lines(manager, servers):
    operator = train()
    ended = {
        "state": EndState.JOB_ENDED,
        "exit_code": 3,
        "last_line": "out of memory",
        "rank": 2,
        "server": "gpu-2",
        "tails": {"2": ["epoch 1", "out of memory"], "1": ["connection reset"]},
    }
    said = []
    operator.log.info = lambda text, *values: said.append(text % values)
    with pytest.raises(AirflowException, match=r"^rank 2 on gpu-2 ended with exit code 3: out of memory$"):
        operator.execute_ended(context_of(), ended)
    assert said == ["[rank 2] epoch 1", "[rank 2] out of memory", "[rank 1] connection reset"]


def test_a_gang_of_a_task_that_was_ended_is_stopped_everywhere(manager, servers, variables, rows):
    started(servers, train())
    keep_end(TASK, TaskEnd(state=EndState.FAILED, detail="nobody collects it any more"))
    listener.on_task_instance_failed(None, _Ended(), None)
    listener.finish()
    assert len(servers.stopped) == 3
    assert manager.leases() == []
    assert variables == {}


class _Ended:
    """Task instance as the scheduler hands it to a listener."""

    dag_id, run_id, task_id, map_index, id = TASK.dag_id, TASK.run_id, TASK.task_id, -1, "a"
    state = "failed"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"startup_order": "first"}, "startup_order must be one of together, workers_first, got 'first'"),
        ({"done_when": "any"}, "done_when must be one of all, rank0, got 'any'"),
        ({"start_attempts": 0}, "start_attempts must be 1 or more, got 0"),
        ({"start_attempts": "3"}, "start_attempts must be 1 or more, got '3'"),
        ({"stale_grace_s": "9"}, "stale_grace_s must be a number of seconds from 0 on, got '9'"),
        ({"stale_grace_s": -1}, "stale_grace_s must be a number of seconds from 0 on, got -1"),
    ],
)
def test_wrong_arguments_are_named(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        train(**wrong)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"nodes": 5}, "a gang of 5 needs 5 servers with 4 GPUs"),
        ({"same": "rack"}, "no server has the label rack, which the servers of the gang must share"),
    ],
)
def test_a_gang_that_can_never_be_granted_fails_at_once(manager, wrong, reason):
    with pytest.raises(AirflowFailException, match=reason):
        train(**wrong).execute(context_of())
    assert manager.queue() == []


def test_a_function_on_several_servers_is_refused_with_a_reason(manager):
    reason = r"nodes=2: @task.gpu runs one function in one worker; a job on several servers is GPUTraining"

    def evaluate(nodes):
        return gpu_task(lambda: None, task_id="t", gpus=2, nodes=nodes)().operator

    with DAG("d"):
        with pytest.raises(ValueError, match=reason):
            evaluate(2)
        templated = evaluate("{{ params.nodes }}")
    templated.nodes = "2"  # as rendered
    with pytest.raises(AirflowFailException, match=reason):
        templated.execute(context_of())
    assert manager.leases() == []


def test_the_tasks_of_a_leased_group_get_the_members(manager):
    with DAG("d") as dag, gpu_lease(gpus=2, nodes=3) as lease:
        members = lease.members
    assert (members.operator.task_id, members.key) == ("gpu_lease.allocate", "members")
    pushed = {}
    allocated = replace(TASK, task_id="gpu_lease.allocate")
    context = context_of(allocated, xcom_push=lambda key, value: pushed.update({key: value}))
    allocate: Any = dag.get_task("gpu_lease.allocate")
    allocation = allocate.execute(context)
    assert pushed == {"members": allocation["members"]}
    assert [member["server_name"] for member in pushed["members"]] == ["gpu-0", "gpu-1", "gpu-2"]


def test_a_pending_gang_beside_the_rest_of_its_last_one_is_pending(manager, fast_triggers):
    """The rest of a gang has the same lease id, and is no grant of the new request."""
    import asyncio

    from resource_manager.airflow.shared_manager import SharedManager

    lease = manager.submit("gang", 4, 1, nodes=3, quarantine=True)
    places = [JobPlace("ssh", machine=name) for name in "abc"]
    manager.place_job("gang", places, fencing_token=lease["fencing_token"])
    manager.release_members("gang", (0, 1), fencing_token=lease["fencing_token"], job_end="ended")
    manager.submit("gang", 4, 1, nodes=4)

    async def seen():
        shared = SharedManager.of("any")
        await shared.catch_up("gang")
        return shared.known("gang"), shared.is_waiting("gang")

    assert asyncio.run(seen()) == (None, True)
    [rest] = manager.leases()
    assert [job.key for job in RunningJob.all_of(rest)] == [job_key("gang", lease["fencing_token"], 2, 3)]
