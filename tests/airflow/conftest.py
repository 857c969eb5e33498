"""Fixtures of the provider's tests: those for authors of DAGs, with still less waiting."""

import json
import logging
import os
import threading
from dataclasses import asdict
from datetime import UTC, datetime

import psutil
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import scoped_session, sessionmaker

from resource_manager.jobs.launchers import LAUNCHERS, terminal
from resource_manager.jobs.launchers.terminal import is_here
from resource_manager.jobs.registered_process import registration


@pytest.fixture(autouse=True)
def ends_its_registration():
    """After each test this process is no job of a lease any more, nor are children of later tests."""
    yield
    while registration:
        os.close(registration.pop())


@pytest.fixture
def manager(gpu_manager):
    """Manager in memory behind every connection."""
    return gpu_manager


@pytest.fixture
def own_address_only(manager, monkeypatch):
    """A server with the address of another machine is another machine again, in spite of `gpu_manager`."""
    monkeypatch.setattr(terminal, "is_here", is_here)
    monkeypatch.delenv("GPU_MANAGER_SERVER", raising=False)


@pytest.fixture
def launch_by(monkeypatch):
    """Return launch_by(opened, *names): `opened(place)` makes the launchers of these names, or all."""

    def use(opened, *names):
        for name in names or LAUNCHERS:
            monkeypatch.setitem(LAUNCHERS, name, opened)

    return use


@pytest.fixture
def at_worker_kill(monkeypatch):
    """Return at_worker_kill(act): `act(signal)` is called where a worker without its lease kills itself."""

    def call(act, children=()):
        kill = os.kill
        monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [*children])
        monkeypatch.setattr(os, "kill", lambda pid, how: act(how) if pid == os.getpid() else kill(pid, how))

    return call


@pytest.fixture
def said_by(monkeypatch):
    """Return said_by(task or trigger): the lines that it logs, whose way differs between versions.

    `note` is called with each line.
    """

    def listen(speaker, level=logging.INFO, note=lambda line: None):
        lines, log = [], logging.Logger("task")

        class Listening(logging.Handler):
            def emit(self, record):
                lines.append(record.getMessage())
                note(lines[-1])

        log.addHandler(Listening(level))
        monkeypatch.setattr(speaker if isinstance(speaker, type) else type(speaker), "log", log)
        return lines

    return listen


PAUSES = {
    "airflow.shared_manager.PAUSE_S": 0.02,
    "airflow.shared_manager.REASONS_EVERY_S": 0.02,
    "airflow.shared_manager.NEW_REASON_S": 0.02,
    "airflow.shared_manager.EXPIRE_EVERY_S": 0.1,
    "airflow.task_trigger.job_watch.LOOK_EVERY_S": 0.05,
    "airflow.task_trigger.member_watch.READ_S": 0.2,
}


@pytest.fixture
def pause(monkeypatch):
    """Return pause(seconds by name): the provider pauses that long between two looks, calls or tries."""

    def use(pauses):
        for name, seconds in pauses.items():
            monkeypatch.setattr(f"resource_manager.{name}", seconds)

    return use


@pytest.fixture
def fast_triggers(manager, pause):
    """Triggers that read the state and the job's output without pauses."""
    pause(PAUSES)


@pytest.fixture
def idle_told(monkeypatch, pause):
    """Event that is set once a process was told that its lease idles; it looks without pauses."""
    from resource_manager.airflow import use_meter
    from resource_manager.manager.use_results import IdleWarning, idle_in_words

    told = threading.Event()

    class Warning(IdleWarning):
        def see(self, gpus, lease_id):
            super().see(gpus, lease_id)
            if idle_in_words(gpus, lease_id):
                told.set()

    pause({"airflow.use_meter.LOOK_EVERY_S": 0.01})
    monkeypatch.setattr(use_meter, "IdleWarning", Warning)
    return told


class Variables(dict):
    """Airflow's Variables, as far as ours are read and written."""

    def set(self, key, text, before):
        self[key] = text

    def delete(self, key):
        self.pop(key, None)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Airflow Variables of the test by name, where the ends of tasks are kept."""
    kept = Variables()
    monkeypatch.setattr("resource_manager.airflow.task_results.CurrentAccess", lambda: kept)
    return kept


@pytest.fixture
def empty_database(tmp_path, monkeypatch):
    """Empty database for Airflow, without tables."""
    from airflow import settings

    engine = create_engine(f"sqlite:///{tmp_path}/airflow.db")
    sessions = scoped_session(sessionmaker(engine, expire_on_commit=False))
    monkeypatch.setattr(settings, "Session", sessions)
    yield engine
    sessions.remove()
    engine.dispose()


@pytest.fixture
def rows(empty_database):
    """Return rows(identity, id): Airflow's database has that task instance, with this id.

    With `rendered` it has what the templates of the task gave, too.
    """
    from airflow.models import import_all_models
    from airflow.models.dagrun import DagRun
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.models.taskinstance import TaskInstance

    import_all_models()  # with the tables that these refer to
    table = TaskInstance.__table__
    table.create(empty_database)
    DagRun.__table__.create(empty_database)
    fields = RenderedTaskInstanceFields.__table__
    fields.create(empty_database)

    def add(identity, row_id, rendered=None):
        of_task = {name: value for name, value in asdict(identity).items() if name != "instance"}
        is_text = type(table.c.id.type).__name__ != "Uuid"  # as in Airflow 3.0
        key = {"id": str(row_id) if is_text else row_id}
        with empty_database.begin() as connection:
            connection.execute(table.insert().values(**of_task, **key, pool="default_pool", pool_slots=1))
            if rendered is not None:
                connection.execute(fields.insert().values(**of_task, rendered_fields=rendered))

    return add


@pytest.fixture
def run_row(rows, empty_database):
    """Return run_row(dag_id, run_id, clear_number): Airflow's database has that run."""
    from airflow.models.dagrun import DagRun

    def add(dag_id, run_id, clear_number):
        of_run = {"dag_id": dag_id, "run_id": run_id, "clear_number": clear_number, "run_type": "manual"}
        of_run |= {"log_template_id": None, "run_after": datetime.now(UTC)}
        with empty_database.begin() as connection:
            connection.execute(DagRun.__table__.insert().values(**of_run))

    return add


@pytest.fixture
def notes(monkeypatch):
    """XComs that triggers stored in Airflow, by key."""
    kept = {}

    async def set_xcom(key, value, **task_instance):
        kept[key] = json.loads(json.dumps(value))

    async def get_xcom(key, **task_instance):
        return kept.get(key)

    monkeypatch.setattr("resource_manager.airflow.task_trigger.notes.set_xcom", set_xcom)
    monkeypatch.setattr("resource_manager.airflow.task_trigger.notes.get_xcom", get_xcom)
    return kept


@pytest.fixture
def wanted(monkeypatch):
    """Say whether Airflow still wants the task: `wanted(False)`; it does until then."""

    def say(is_wanted):
        for module in ("task_trigger.base", "task_trigger.task_lease", "operators.training", "task_results"):
            monkeypatch.setattr(f"resource_manager.airflow.{module}.is_wanted", lambda identity: is_wanted)

    say(True)
    return say
