"""Two Airflow instances, production and staging, on one real Redis: neither changes the other's leases."""

import asyncio
import json
import secrets
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import granted_lease

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.models.variable import Variable

    with suppress(ImportError):  # since 3.1
        import airflow.models.team  # noqa: F401
    from fastapi import FastAPI

    from resource_manager.airflow import GPUAllocateOperator, GPUReleaseOperator, listener
    from resource_manager.airflow.links import ConsoleLink
    from resource_manager.airflow.operators import reconcile as operator_module
    from resource_manager.airflow.registration import AT_START, publish_at_start
    from resource_manager.airflow.sensors import GPUAvailableSensor
    from resource_manager.airflow.task_results import keep_end
    from resource_manager.airflow.task_state import identity_of
    from resource_manager.airflow.task_trigger.events import EndState, TaskEnd
    from resource_manager.airflow.version_compat import AirflowException, AirflowFailException, TaskDeferred
    from tests.airflow.asking import ask

from resource_manager import GPUResourceManager
from resource_manager.core.models import Request
from resource_manager.errors import SettingsError, StoreUnavailableError
from resource_manager.jobs.airflow_instance import VARIABLE, instance_id, publish_instance
from resource_manager.jobs.launchers import Job, JobState
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.reconcile import reconcile
from resource_manager.jobs.running_job import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.forecasts import Forecasts
from resource_manager.rest.console.cells import task_link
from resource_manager.storage.airflow_variable.access import DatabaseAccess
from tests.eventually import wait_for
from tests.jobs.gangs import place
from tests.listening import client_of

OURS = TaskIdentity("production", "etl", "nightly", "train")
THEIRS = replace(OURS, instance="staging")
TASK = SimpleNamespace(
    dag_id="etl",
    run_id="nightly",
    task_id="train",
    map_index=-1,
    id=UUID(int=1),
    state="failed",
    xcom_push=lambda key, value: None,
)
RUN = SimpleNamespace(dag_id="etl", run_id="nightly", state="success", clear_number=0, dag=None)
FAILED = SimpleNamespace(**{**vars(RUN), "state": "failed"})


class NothingGoesOn:
    """States of an Airflow without unfinished tasks."""

    def unfinished(self, identities):
        return set()

    def run_is_unfinished(self, dag_id, run_id):
        return False


@pytest.fixture
def manager(embedded_redis, tmp_path, monkeypatch):
    """Manager on a namespace that is the default connection of both Airflow instances."""
    url = embedded_redis.fresh_url()
    connection = {"conn_type": "gpu_manager", "host": url}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    listener.finish()
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        yield manager
    listener.finish()


@pytest.fixture
def instance(monkeypatch):
    """Context manager `instance(name)`: its block runs in the Airflow of this id, or without one for None."""

    @contextmanager
    def process(name):
        with monkeypatch.context() as patch:
            if name is None:
                patch.delenv("GPU_MANAGER_INSTANCE", raising=False)
            else:
                patch.setenv("GPU_MANAGER_INSTANCE", name)
            forget()
            yield
        forget()

    def forget():
        instance_id.cache_clear()
        publish_instance.cache_clear()

    return process


@pytest.fixture
def database(empty_database):
    """Database of the test with Airflow's own table of Variables."""
    named = [
        Variable.metadata.tables[name] for name in ("team", "variable") if name in Variable.metadata.tables
    ]
    Variable.metadata.create_all(empty_database, named)
    return DatabaseAccess()


def allocate(**arguments):
    """Return the operator's allocation for the task that both Airflow instances have."""
    return GPUAllocateOperator(task_id="train", gpus=2, **arguments).execute({"ti": TASK})


def both_allocate(instance):
    with instance("production"):
        ours = allocate()
    with instance("staging"):
        theirs = allocate()
    return ours, theirs


def start_job(manager, identity):
    """Start a job of `sleep` under its own lease; return its key."""
    lease = manager.submit(identity.lease_id, 2, 1, ttl=60, labels=identity.labels, quarantine=True)
    [job] = RunningJob.all_of(place(manager, lease))
    key = job.key
    LocalLauncher().start(Job(key, ("sleep", "60")))
    return key


def held(manager):
    return {lease["task_id"] for lease in manager.leases()}


def after_the_listener(act):
    """Call a hook of the listener and wait until its work is done."""
    act()
    listener._thread().submit(lambda: None).result(30)


def test_tasks_with_equal_names_in_two_airflows_hold_different_gpus(manager, instance):
    ours, theirs = both_allocate(instance)
    assert (ours["task_id"], theirs["task_id"]) == (
        "production:etl/nightly/train",
        "staging:etl/nightly/train",
    )
    where = [(lease["server_id"], gpu) for lease in (ours, theirs) for gpu in lease["gpu_ids"]]
    assert len(set(where)) == 4
    assert [lease["labels"]["instance"] for lease in (ours, theirs)] == ["production", "staging"]
    with instance("production"):
        assert allocate()["fencing_token"] == ours["fencing_token"], "the next try finds its own"


def test_the_reconciler_keeps_and_counts_the_leases_of_another_airflow(manager):
    our_job, their_job = start_job(manager, OURS), start_job(manager, THEIRS)
    assert our_job != their_job
    for server in range(4):
        manager.submit(f"by-hand-{server}", 2, 1, server)
    for identity in (OURS, THEIRS):
        waiting = replace(identity, task_id="waits")
        assert manager.submit(waiting.lease_id, 8, 8, labels=waiting.labels)["state"] == "WAITING"

    done = reconcile(manager, NothingGoesOn(), "staging")
    assert [(action.task_id, action.action) for action in done.actions] == [
        ("staging:etl/nightly/train", "released"),
        ("staging:etl/nightly/waits", "cancelled"),
    ]
    assert done.other_instances == 2
    assert LocalLauncher().status(our_job).state is JobState.RUNNING
    assert LocalLauncher().status(their_job).state is JobState.ABSENT

    done = reconcile(manager, NothingGoesOn(), "production")
    assert [action.task_id for action in done.actions] == [
        "production:etl/nightly/train",
        "production:etl/nightly/waits",
    ]
    assert done.other_instances == 0
    assert LocalLauncher().status(our_job).state is JobState.ABSENT
    assert held(manager) == {f"by-hand-{server}" for server in range(4)}


def test_a_reconciliation_tells_each_action_once(manager, instance, monkeypatch, caplog, said_by):
    monkeypatch.setattr(operator_module, "ExecutionTaskStates", NothingGoesOn)
    manager.submit(OURS.lease_id, 2, 1, labels=OURS.labels)
    operator = operator_module.GPUReconcileOperator(task_id="reconcile")
    said = said_by(operator)
    with instance("production"), caplog.at_level("INFO", "resource_manager.jobs.reconcile"):
        done = operator.execute({"ti": TASK})
        assert done is not None
        [action] = done["actions"]
        assert operator.execute({"ti": TASK}) is None, "a run without an action leaves no XCom"
    line = f"{action['action']} {action['name']}: {action['detail']}"
    assert [*caplog.messages, *said].count(line) == 1, "Airflow's log of a task has both"


def test_a_lease_is_released_only_by_its_own_airflow(manager, instance):
    ours, theirs = both_allocate(instance)
    release = GPUReleaseOperator(task_id="release", lease=ours)
    with (
        instance("staging"),
        pytest.raises(
            AirflowFailException,
            match="belongs to the Airflow instance 'production', not to this one, 'staging': release it",
        ),
    ):
        release.execute({"ti": TASK})
    assert held(manager) == {ours["task_id"], theirs["task_id"]}
    with instance("production"):
        release.execute({"ti": TASK})
    assert held(manager) == {theirs["task_id"]}


def test_the_history_says_which_task_of_which_airflow_asked(manager, instance, rows):
    ours, _ = both_allocate(instance)
    with instance("production"):
        GPUReleaseOperator(task_id="end", lease=ours).execute({"ti": TASK})
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "ended by a user"))
    with instance("staging"):
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "ended by a user"))
    assert held(manager) == set()
    asked = [(change["change"], change["by"]) for change in manager.history()]
    assert asked == [
        ("granted", "airflow:production/adhoc_airflow/train"),
        ("granted", "airflow:staging/adhoc_airflow/train"),
        ("released", "airflow:production/adhoc_airflow/end"),
        ("released", "airflow:staging/etl"),
    ]


def test_the_listener_ends_only_leases_of_its_own_airflow(manager, instance, rows):
    our_job, their_job = start_job(manager, OURS), start_job(manager, THEIRS)
    with instance("staging"):
        after_the_listener(lambda: listener.on_task_instance_failed(None, TASK, "ended by a user"))
    assert held(manager) == {OURS.lease_id}
    assert LocalLauncher().status(our_job).state is JobState.RUNNING
    assert LocalLauncher().status(their_job).state is JobState.ABSENT
    LocalLauncher().stop(our_job, 0)


def test_the_listener_leaves_a_task_alone_that_was_cleared_before_it_came_to_it(
    manager, instance, rows, variables
):
    """It ends one task at a time, and a server out of reach takes it half a minute."""
    job = start_job(manager, OURS)
    with instance("production"):
        keep_end(OURS, TaskEnd(state=EndState.JOB_ENDED, exit_code=0))
        rows(replace(OURS, map_index=3), UUID(int=1))
        rows(OURS, UUID(int=2))
        after_the_listener(lambda: listener.on_task_instance_failed(None, TASK, "marked by a user"))
        assert (held(manager), len(variables)) == ({OURS.lease_id}, 1)
        assert LocalLauncher().status(job).state is JobState.RUNNING
        new_try = SimpleNamespace(**{**vars(TASK), "id": UUID(int=2)})
        after_the_listener(lambda: listener.on_task_instance_failed(None, new_try, "marked again"))
    assert (held(manager), len(variables)) == (set(), 0)


def test_the_listener_leaves_a_run_alone_that_was_cleared_before_it_came_to_it(manager, instance, run_row):
    """`GPUAllocateOperator` gets its lease back then, and the tasks of the run go on under it."""
    ours, _ = both_allocate(instance)
    with instance("production"):
        run_row(RUN.dag_id, RUN.run_id, clear_number=1)
        run_row(RUN.dag_id, "another", clear_number=0)
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "marked by a user"))
        assert ours["task_id"] in held(manager)
        again = SimpleNamespace(**{**vars(RUN), "clear_number": 1})
        after_the_listener(lambda: listener.on_dag_run_success(again, "marked again"))
    assert ours["task_id"] not in held(manager)


def test_the_listener_ends_only_leases_of_runs_of_its_own_airflow(manager, instance, rows):
    ours, _ = both_allocate(instance)
    with instance("staging"):
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "ended by a user"))
    assert held(manager) == {ours["task_id"]}
    with instance(None):
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "no table of Variables in this database"))
    assert held(manager) == {ours["task_id"]}, "an Airflow without an instance id ends no lease"
    with instance("production"):
        after_the_listener(lambda: listener.on_dag_run_success(RUN, ""))
    assert held(manager) == set()


def test_neither_the_end_of_a_run_nor_the_reconciler_estimates_starts(manager, instance, rows, monkeypatch):
    """A scheduler is told of the end of every run, and the starts of a long queue take it seconds."""
    estimated = []
    monkeypatch.setattr(Forecasts, "shared", lambda *_: estimated.append("starts"))
    for number in range(5):
        manager.submit(f"by-hand-{number}", 8, 8)
    with instance("staging"):
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "it is over"))
    reconcile(manager, NothingGoesOn(), "staging")
    assert estimated == []
    assert len(manager.queue(estimated=False)) == 1


def test_a_task_that_was_ended_while_it_waited_for_a_lease_of_its_run_waits_no_more(manager, instance, rows):
    for number in range(4):
        manager.submit(f"holds-{number}", 8, 1)
    with instance("staging"):
        with pytest.raises(TaskDeferred):
            allocate()
        after_the_listener(lambda: listener.on_task_instance_failed(None, TASK, "ended by a user"))
    assert manager.queue() == []


def test_a_run_that_a_user_has_marked_keeps_its_lease_until_its_teardowns_are_over(manager, instance, rows):
    """Airflow calls the listener at once, and leaves the run running for them."""
    with instance("staging"):
        lease = allocate()
        marked = SimpleNamespace(**{**vars(RUN), "state": "running"})
        after_the_listener(lambda: listener.on_dag_run_success(marked, "Dag Run's state was manually set"))
        assert held(manager) == {lease["task_id"]}
        after_the_listener(lambda: listener.on_dag_run_success(RUN, "its last teardown is over"))
    assert held(manager) == set()


def test_a_lease_of_a_run_that_was_ended_lasts_as_long_as_the_processes_of_its_tasks(
    manager, instance, monkeypatch
):
    """At a dagrun_timeout Airflow says at once that the run is over; a worker learns it later."""
    monkeypatch.setattr("resource_manager.jobs.reconcile.ENDING_S", 0.1)
    with instance("staging"):
        allocate()
        after_the_listener(lambda: listener.on_dag_run_failed(FAILED, "timed_out"))
        assert len(manager.leases()) == 1, "the reconciler will end it"
        cleared = Mock(unfinished=lambda identities: set(), run_is_unfinished=Mock(side_effect=[False, True]))
        assert reconcile(manager, cleared, "staging").actions == [], "it goes on under its lease"
        over = Mock(unfinished=lambda identities: set(), run_is_unfinished=lambda dag_id, run_id: False)
        began = time.time()
        reconcile(manager, over, "staging")
    assert held(manager) == set()
    assert manager.history()[-1]["at"] >= began + 0.1


def test_the_service_separates_instances_like_the_store(manager, tmp_path):
    slashes = replace(OURS, run_id="2026/11%2F22")
    with client_of(manager, tmp_path) as client:
        for identity in (OURS, THEIRS, slashes):
            lease = ask(client, identity, 2)
            assert (lease["task_id"], lease["labels"]) == (identity.lease_id, identity.labels)
            assert client.renew(identity.lease_id, fencing_token=lease["fencing_token"])
        done = reconcile(client, NothingGoesOn(), "staging")
        assert ([action.task_id for action in done.actions], done.other_instances) == ([THEIRS.lease_id], 2)
        assert held(manager) == {OURS.lease_id, slashes.lease_id}
        assert granted_lease(client.status_of(slashes.lease_id))["labels"]["run_id"] == "2026/11%2F22"
        assert client.release_resources(slashes.lease_id)


def test_the_sensor_and_the_link_use_the_lease_id_of_their_own_airflow(manager, instance, connect):
    asked = []

    def listening(demand, **more):
        asked.append(demand.lease_id)
        return manager.explain(demand, **more)

    connect(Mock(wraps=manager, explain=listening))
    sensor = GPUAvailableSensor(task_id="train", gpus=2)
    with instance("staging"):
        assert sensor.poke({"ti": TASK})
        assert asked == [f"{THEIRS.lease_id} (sensor)"]
        ti_key: Any = TASK
        link = ConsoleLink().get_link(sensor, ti_key=ti_key)
    assert unquote(link).endswith(f"/gpu/lease?id={THEIRS.lease_id}")


def test_the_console_links_only_to_tasks_of_its_own_airflow():
    request = Request(OURS.lease_id, labels=OURS.labels)
    mapped = Request("x", labels=replace(OURS, map_index=3).labels)
    here: Any = SimpleNamespace(airflow_url="https://airflow.example", instance="production")
    page = "https://airflow.example/dags/etl/runs/nightly/tasks/train"
    assert task_link(request, here) == page
    assert task_link(mapped, here) == f"{page}/mapped/3"
    elsewhere: Any = SimpleNamespace(airflow_url="", instance="staging")
    assert task_link(request, elsewhere) is None
    unknown: Any = SimpleNamespace(airflow_url="https://airflow.example", instance=None)
    assert task_link(request, unknown) == page, "a service without an instance id links to its one Airflow"


INSTANCES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,5}", fullmatch=True)
IDS = st.from_regex(r"[\w.-]{0,5}\w", fullmatch=True)
NAMES = st.text("a/%2F:5-", min_size=1, max_size=8)


@given(INSTANCES, NAMES, NAMES, NAMES, st.integers(-1, 99))
def test_no_two_tasks_have_the_same_lease_id(instance, dag_id, run_id, task_id, map_index):
    """The identity can be parsed from its lease id, so no two identities share one."""
    identity = TaskIdentity(instance, dag_id, run_id, task_id, map_index)
    name, _, path = identity.lease_id.partition(":")
    dag, run, task, *index = path.split("/")
    names = [text.replace("%2F", "/").replace("%25", "%") for text in (dag, run, task)]
    assert TaskIdentity(name, names[0], names[1], names[2], *map(int, index)) == identity


@given(INSTANCES, IDS, NAMES, IDS, st.integers(-1, 99))
def test_an_identity_survives_its_labels(instance, dag_id, run_id, task_id, map_index):
    identity = TaskIdentity(instance, dag_id, run_id, task_id, map_index)
    assert TaskIdentity.from_labels(identity.labels) == identity


def test_default_airflow_ids_are_unchanged_in_the_lease_id():
    task = TaskIdentity("staging", "my.dag-1", "scheduled__2026-11-22T06:00:00+00:00", "group.train", 3)
    assert task.lease_id == "staging:my.dag-1/scheduled__2026-11-22T06:00:00+00:00/group.train/3"


def test_labels_without_an_instance_belong_to_no_airflow():
    labels = dict(OURS.labels)
    del labels["instance"]
    assert TaskIdentity.from_labels(labels) is None


def test_a_configured_id_needs_no_variable(instance):
    with instance("prod.eu-1_a"):
        assert instance_id() == "prod.eu-1_a"


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "a:b", "-a", "é", "a\n", "a" * 41])
def test_a_wrong_id_is_one_line(instance, wrong):
    with (
        instance(wrong),
        pytest.raises(SettingsError, match=r"^GPU_MANAGER_INSTANCE: an instance is") as caught,
    ):
        instance_id()
    assert str(caught.value).isprintable()
    with instance(wrong), pytest.raises(AirflowException, match="GPU_MANAGER_INSTANCE"):
        identity_of({"ti": TASK})


def test_a_missing_id_fails_with_advice_until_it_is_published(database, instance):
    with instance(None):
        with pytest.raises(AirflowException, match="no instance id yet: start its API server") as caught:
            identity_of({"ti": TASK})
        assert str(caught.value).isprintable()
        made = publish_instance()
        assert identity_of({"ti": TASK}).instance == made
        database.set(VARIABLE, "another", made)
        assert instance_id() == made, "the process caches the id"


def test_a_wrong_variable_is_one_line(database, instance):
    database.set(VARIABLE, "a/b", None)
    for read in (instance_id, publish_instance):
        with (
            instance(None),
            pytest.raises(SettingsError, match=r"^Airflow Variable 'gpu_manager_inst"),
        ):
            read()


def test_an_outage_is_not_reported_as_a_missing_id(empty_database, instance):
    with instance(None), pytest.raises(StoreUnavailableError, match="cannot be reached through the database"):
        instance_id()


def test_api_servers_that_start_at_once_publish_one_id(database, instance):
    together = threading.Barrier(4)

    def start(_):
        together.wait(30)
        return publish_instance()

    with instance(None), ThreadPoolExecutor(4) as pool:
        made = set(pool.map(start, range(4)))
        assert made == {database.get(VARIABLE)}
    with instance(None):
        assert publish_instance() in made, "a restart keeps the id"


@pytest.fixture
def draw_by(monkeypatch):
    """Return draw_by(function): that one draws what is random of an id."""
    return lambda function: monkeypatch.setattr(secrets, "token_hex", function)


def test_an_id_is_never_a_number_to_airflows_rest_api(database, instance, draw_by):
    draw_by(lambda _: "710e3660")
    with instance(None), pytest.raises(ValueError):
        json.loads(publish_instance())


def test_a_second_api_server_uses_the_id_of_the_first(database, instance, draw_by):
    def meanwhile(_):
        assert database.set(VARIABLE, "first", None)
        return "second"

    draw_by(meanwhile)
    with instance(None):
        assert publish_instance() == "first"
    assert database.get(VARIABLE) == "first"


def test_a_configured_id_replaces_that_of_a_copied_database(database, instance):
    with instance(None):
        production = publish_instance()
    with instance("staging"):
        assert publish_instance() == "staging"
    with instance(None):
        assert instance_id() == "staging" != production


def test_the_id_is_published_before_the_api_server_answers(database, instance):
    async def start():
        app = FastAPI()
        middleware: Any = AT_START["middleware"]
        app.add_middleware(middleware)
        said: asyncio.Queue[Any] = asyncio.Queue()
        server = asyncio.create_task(app({"type": "lifespan"}, told.get, said.put))
        await told.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        made = database.get(VARIABLE)
        await told.put({"type": "lifespan.shutdown"})
        await server
        return made

    told: asyncio.Queue[Any] = asyncio.Queue()
    with instance(None):
        made = asyncio.run(start())
        assert made is not None
        assert made == instance_id()


def test_the_id_is_written_once_the_database_is_ready(database, instance, monkeypatch, pause, caplog):
    get, fails = DatabaseAccess.get, iter([True, True, True])

    def not_ready(self, key):
        if next(fails, False):
            raise StoreUnavailableError("the database is not ready")
        return get(self, key)

    monkeypatch.setattr(DatabaseAccess, "get", not_ready)
    pause({"airflow.registration.FIRST_RETRY_S": 0.01})
    app = object()
    with instance(None):
        assert publish_at_start(app) is app
        wait_for(lambda: get(database, VARIABLE) is not None)
        wait_for(lambda: "publish-instance" not in {thread.name for thread in threading.enumerate()})
    assert caplog.text.count("the database is not ready") == 3


def test_airflow_starts_with_a_wrong_id(database, instance, caplog):
    app = object()
    with instance("a b"):
        assert publish_at_start(app) is app
    assert "no instance id, so tasks get no GPUs: GPU_MANAGER_INSTANCE: an instance is" in caplog.text
    with instance(None):
        assert publish_at_start(app) is app
    assert database.get(VARIABLE) is not None
