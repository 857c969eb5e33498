"""Whose it is: nobody ends another's job, lease or queue entry, also not between a check and the act."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from resource_manager.manager.results import Submission
from tests.builders import granted_lease, redefine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow warns on import
    from resource_manager.airflow import GPUAllocateOperator, GPUReleaseOperator, listener
    from resource_manager.airflow.task_demand import end_lease, submit, team_of
    from resource_manager.airflow.task_trigger.events import GrantState
    from resource_manager.airflow.version_compat import AirflowException, AirflowFailException

from resource_manager import GPUResourceManager
from resource_manager.cli.program import main
from resource_manager.core.changes import JobPlaced
from resource_manager.core.models import JobPlace
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import InvalidRequestError, LeaseNotFoundError
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.launchers import Job, JobState, job_key
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.reconcile import ActionKind, end, reconcile
from resource_manager.jobs.running_job import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.demand import Demand
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.client_errors import ServiceError
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.jobs.gangs import place

AsRole = Callable[..., FlaskClient]
TASK = TaskIdentity("production", "etl", "nightly", "train")
RUNNING = SimpleNamespace(
    dag_id="etl", run_id="nightly", task_id="train", map_index=-1, id="a", state="failed"
)
BODY = {"required_gpus": 8, "required_cpus": 1}


@pytest.fixture(autouse=True)
def airflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("GPU_MANAGER_INSTANCE", TASK.instance)
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    instance_id.cache_clear()
    yield
    instance_id.cache_clear()


@pytest.fixture
def client_of(service: Service, kept: Persistence) -> Iterator[Callable[..., ServiceClient]]:
    """Return client_of(name, role): a client of the service with that person's token."""
    app = create_app(service)
    made: list[ServiceClient] = []

    def client(name: str, role: Role = Role.USER) -> ServiceClient:
        text = tokens.create(kept.tokens, name, role)
        found = ServiceClient("http://localhost", text, transport=httpx.WSGITransport(app))
        made.append(found)
        return found

    yield client
    for found in made:
        found.close()


@pytest.fixture
def start_job(service: Service) -> Iterator[Callable[[dict[str, Any]], str]]:
    """Return start_job(lease): start the lease's job, a real process, and return its key."""
    started: list[str] = []

    def start(lease: dict[str, Any]) -> str:
        [job] = RunningJob.all_of(place(service.manager, lease))
        LocalLauncher().start(Job(job.key, ("sleep", "600")))
        started.append(job.key)
        return job.key

    yield start
    for key in started:
        LocalLauncher().stop(key, 0)


def labels(**more: str) -> dict[str, str]:
    return {**TASK.labels, **more}


def demand(gpus: int) -> Demand:
    return Demand(lease_id=TASK.lease_id, gpus=gpus, owner="ada", labels=labels())


def runs(key: str) -> bool:
    return LocalLauncher().status(key).state is JobState.RUNNING


# ---- leases ----


def test_a_job_lives_on_if_its_lease_may_not_be_released(client_of: Any, start_job: Any) -> None:
    """Stopping comes before releasing: the check must come before both."""
    bob, ada, operator = client_of("bob"), client_of("ada"), client_of("olga", Role.OPERATOR)
    lease = bob.submit("bobs", 2, 1, labels=labels())
    key = start_job(lease)
    (seen,) = ada.leases()
    with pytest.raises(ServiceError, match="belongs to bob, not to ada") as caught:
        end(ada, seen)
    assert caught.value.status == 403
    assert runs(key)
    assert ada.status_of("bobs")["fencing_token"] == lease["fencing_token"]
    assert end(operator, seen).action is ActionKind.RELEASED  # exempt by role
    assert not runs(key)


@pytest.mark.parametrize("launcher", ["local", "terminal"])
def test_a_place_of_a_user_s_own_making_leads_to_no_process_of_another(
    client_of: Any, manager: GPUResourceManager, tmp_path: Path, launcher: str, bystander: Any
) -> None:
    """The console, `stop` and `reconcile` end jobs as the service's account, where leases say they are."""
    ada = client_of("ada")
    token = ada.submit("adas", 2, 1)["fencing_token"]
    evil = tmp_path / "evil"
    (evil / job_key("adas", token)).mkdir(parents=True)
    (evil / "mark").write_text("f00d")
    (evil / job_key("adas", token) / "group").write_text(str(bystander.pid))
    before = sorted(evil.rglob("*"))
    nowhere = JobPlace(launcher, folder=str(evil))
    with pytest.raises(InvalidRequestError, match="must state the machine"):
        ada.place_job("adas", [nowhere], fencing_token=token)
    # A state may have such a place from before.
    manager.commit(lambda cluster, now: [JobPlaced("adas", token, (nowhere,), now)])
    assert end(manager, manager.leases()[0]).action is ActionKind.KEPT
    assert bystander.poll() is None
    assert sorted(evil.rglob("*")) == before


def test_a_user_ends_their_own_lease_and_its_job(client_of: Any, start_job: Any) -> None:
    ada = client_of("ada")
    key = start_job(ada.submit("adas", 2, 1, labels=labels()))
    assert end(ada, ada.status_of("adas")).action is ActionKind.RELEASED
    assert not runs(key)


def test_a_reconciler_with_a_users_token_stops_no_job_of_others(client_of: Any, start_job: Any) -> None:
    class NothingGoesOn:
        def unfinished(self, identities: Any) -> set[Any]:
            return set()

        def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
            return False

    key = start_job(client_of("bob").submit(TASK.lease_id, 2, 1, labels=labels()))
    (action,) = reconcile(client_of("ada"), NothingGoesOn(), TASK.instance).actions
    assert action.action is ActionKind.KEPT
    assert "belongs to bob" in action.detail
    assert runs(key)
    (action,) = reconcile(client_of("olga", Role.OPERATOR), NothingGoesOn(), TASK.instance).actions
    assert action.action is ActionKind.RELEASED


def test_the_release_operator_stops_no_job_of_another_user(
    client_of: Any, start_job: Any, connect: Any
) -> None:
    lease = client_of("bob").submit("bobs", 2, 1, labels=labels())
    key = start_job(lease)
    connect(client_of("ada"))
    with pytest.raises(AirflowException, match="belongs to bob"):
        GPUReleaseOperator(task_id="release", lease=lease).execute({"ti": RUNNING})
    assert runs(key)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dag_id": "other"}, "belongs to the DAG 'other'"),
        ({"instance": "staging"}, "belongs to the Airflow instance 'staging'"),
        ({"instance": None, "dag_id": None}, "belongs to the Airflow instance None"),
    ],
    ids=str,
)
def test_the_release_operator_ends_only_leases_of_its_dag(
    changed: dict[str, Any],
    words: str,
    manager: GPUResourceManager,
    start_job: Any,
    connect: Any,
) -> None:
    """Also with the store itself, where nobody asks for the caller's name."""
    given = {name: value for name, value in {**labels(), **changed}.items() if value is not None}
    lease = manager.submit("theirs", 2, 1, labels=given)
    key = start_job(lease)
    connect(manager)
    with pytest.raises(AirflowFailException, match=words):
        GPUReleaseOperator(task_id="release", lease=lease).execute({"ti": RUNNING})
    assert runs(key)
    assert manager.status_of("theirs") is not None


@pytest.mark.parametrize("by", ["service", "store"])
@pytest.mark.parametrize("gpus", [2, 4], ids=["same shape", "another shape"])
def test_a_task_ends_no_lease_that_another_made_under_its_id(
    by: str, gpus: int, manager: GPUResourceManager, client_of: Any, start_job: Any
) -> None:
    lease = client_of("mallory").submit(TASK.lease_id, 2, 1, labels=labels())
    key = start_job(lease)
    mine = client_of("ada") if by == "service" else manager
    with pytest.raises(AirflowException, match=r"belongs to|was not requested by this task"):
        submit(mine, demand(gpus), TASK)
    with pytest.raises(AirflowException, match=r"belongs to|was not requested by this task"):
        end_lease(mine, TASK, "ada")
    assert runs(key)
    assert granted_lease(manager.status_of(TASK.lease_id))["fencing_token"] == lease["fencing_token"]


def test_a_task_still_ends_its_own_lease_of_another_shape(
    manager: GPUResourceManager, client_of: Any, start_job: Any
) -> None:
    for mine in (manager, client_of("ada")):
        first = granted_lease(submit(mine, demand(2), TASK))
        key = start_job(first)
        second = granted_lease(submit(mine, demand(4), TASK))
        assert second["fencing_token"] > first["fencing_token"]
        assert not runs(key)
        end_lease(mine, TASK, "ada")


def test_a_task_ends_its_own_lease_that_was_released_by_force_and_gets_another(
    manager: GPUResourceManager, client_of: Any, start_job: Any
) -> None:
    for mine in (manager, client_of("ada")):
        first = granted_lease(submit(mine, demand(2), TASK))
        key = start_job(first)
        manager.release(TASK.lease_id, job_end="forced")
        second = granted_lease(submit(mine, demand(2), TASK))
        assert second["fencing_token"] > first["fencing_token"]
        assert not runs(key)
        end_lease(mine, TASK, "ada")


def test_the_listener_ends_no_lease_that_only_has_the_tasks_id(
    manager: GPUResourceManager, start_job: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = start_job(manager.submit(TASK.lease_id, 2, 1, labels=labels(dag_id="other")))
    connect(manager)
    row = {"id": RUNNING.id, "rendered_fields": None}  # there is no database of Airflow
    monkeypatch.setattr(listener, "_stored", lambda column, of: row[column.key])
    listener.on_task_instance_failed(None, RUNNING, "ended by a user")
    listener._thread().submit(lambda: None).result(30)
    assert runs(key)
    assert manager.status_of(TASK.lease_id) is not None


def test_a_lease_made_under_an_ended_ones_id_is_not_taken_for_it(client_of: Any) -> None:
    """Its old holder is told that the lease is over, and stops the job; a 403 would be tried again."""
    ada, mallory = client_of("ada"), client_of("mallory")
    old = ada.submit(TASK.lease_id, 2, 1)["fencing_token"]
    ada.release_resources(TASK.lease_id, fencing_token=old)
    new = mallory.submit(TASK.lease_id, 2, 1)["fencing_token"]
    with pytest.raises(LeaseNotFoundError):
        ada.renew(TASK.lease_id, fencing_token=old)
    assert not ada.release_resources(TASK.lease_id, fencing_token=old)
    with pytest.raises(ServiceError, match="belongs to mallory"):
        ada.release_resources(TASK.lease_id, fencing_token=new)
    assert mallory.renew(TASK.lease_id, fencing_token=new)["owner"] == "mallory"


# ---- the queue ----


@pytest.mark.parametrize("path", ["/api/cancel", "/act/cancel"])
def test_a_cancel_between_check_and_act_removes_no_entry_of_another(
    path: str, as_role: AsRole, manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ada's entry goes and Bob's comes under its id when hers was looked at and nothing is written yet."""
    ada, other = as_role(Role.USER, "ada"), GPUResourceManager(manager.settings, store=manager.store)
    for server in range(4):
        other.submit(f"fill-{server}", 8, 1)
    other.submit("w", 8, 1, owner="ada")
    read, commit = manager.status_of, manager.store.commit
    swaps = iter([lambda: (other.cancel("w"), other.submit("w", 8, 1, owner="bob"))])

    def before_the_act(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **options: Any) -> Any:
            swap = next(swaps, None)
            if swap is not None:
                swap()
            return act(*args, **options)

        return acting

    def status_of(lease_id: str) -> Submission | None:  # a service that checks with a read of its own
        found = read(lease_id)
        before_the_act(lambda: None)()
        return found

    monkeypatch.setattr(manager.store, "commit", before_the_act(commit))
    monkeypatch.setattr(manager, "status_of", status_of)
    content: dict[str, Any] = {"json" if path.startswith("/api") else "data": {"task_id": "w"}}
    assert ada.post(path, **content).status_code in (403, 404)
    assert next(swaps, None) is None
    assert [entry["owner"] for entry in other.queue()] == ["bob"]


def test_a_cancel_names_the_entry_it_was_decided_on(as_role: AsRole, manager: GPUResourceManager) -> None:
    """A page shown an hour ago, a reconciler's list: the task has asked again since."""
    ada = as_role(Role.USER, "ada")
    for server in range(4):
        manager.submit(f"fill-{server}", 8, 1)
    old = ada.post("/api/submit", json={"task_id": "w", **BODY}).json["sequence"]  # type: ignore[index]
    assert ada.post("/api/cancel", json={"task_id": "w", "sequence": old}).status_code == 200
    new = ada.post("/api/submit", json={"task_id": "w", **BODY}).json["sequence"]  # type: ignore[index]
    assert new > old
    assert ada.post("/api/cancel", json={"task_id": "w", "sequence": old}).status_code == 404
    assert f'name="sequence" value="{new}"' in ada.get("/lease?id=w").get_data(as_text=True)
    assert not manager.cancel("w", sequence=old)
    assert manager.cancel("w", sequence=new)


def test_max_wait_cancels_only_the_tasks_own_entry(manager: GPUResourceManager, connect: Any) -> None:
    connect(manager)
    for server in range(4):
        manager.submit(f"fill-{server}", 8, 1)
    event = {"state": GrantState.MAX_WAIT_EXCEEDED, "waited_s": 1.0, "reasons": []}
    operator = GPUAllocateOperator(task_id="train", gpus=8)
    manager.submit(TASK.lease_id, 8, 1, labels={**TASK.labels, "dag_id": "other"})
    operator.fail_if_overdue({"ti": RUNNING}, event)
    assert len(manager.queue()) == 1
    manager.cancel(TASK.lease_id)
    manager.submit(TASK.lease_id, 8, 1, labels=TASK.labels)
    with pytest.raises(AirflowException, match="no GPUs within max_wait"):
        operator.fail_if_overdue({"ti": RUNNING}, event)
    assert manager.queue() == []


# ---- teams ----


@pytest.fixture
def bound(service: Service, kept: Persistence) -> Callable[..., FlaskClient]:
    """Return bound(*teams, role=…): a client with ada's token, bound to these teams."""

    def client(*teams: str, role: Role = Role.USER) -> FlaskClient:
        made = create_app(service).test_client()
        text = tokens.create(kept.tokens, "ada", role, teams=teams)
        made.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
        return made

    return client


def test_a_token_of_some_teams_names_no_other(bound: Any, manager: GPUResourceManager) -> None:
    ada = bound("vision", "nlp")
    for path in ("/api/allocate", "/api/submit"):
        body = {"task_id": "t", **BODY, "team": "speech"}
        refused = ada.post(path, json=body)
        assert refused.status_code == 403
        assert "team must be one of ada's (vision, nlp), got speech" in refused.json["detail"]
    batch = {"requests": [{"task_id": "a", **BODY}, {"task_id": "b", **BODY, "team": "speech"}]}
    refused = ada.post("/api/allocate/batch", json=batch)
    told = "requests.1.team must be one of ada's (vision, nlp), got speech"
    assert (refused.status_code, refused.json["detail"]) == (403, told)
    assert manager.get_resource_summary()["version"] == 0
    teams = [
        ada.post("/api/allocate", json={"task_id": f"t{number}", **BODY, **team}).json["team"]
        for number, team in enumerate(({"team": "nlp"}, {"team": ""}, {}))
    ]
    assert teams == ["nlp", "vision", "vision"]
    assert ada.get("/api/caller").json == {"name": "ada", "role": "user", "teams": ["vision", "nlp"]}


def test_what_would_start_sooner_is_of_teams_that_the_caller_may_name(
    bound: Any, manager: GPUResourceManager
) -> None:
    redefine(manager, teams=Teams((Team("vision", limit=1), Team("nlp"), Team("speech"))))
    both = [{"nlp"}, {"nlp", "speech"}]
    for client, teams in zip((bound("vision", "nlp"), bound()), both, strict=True):
        answer = client.get("/api/explain", query_string={**BODY, "team": "vision"}).json
        assert {each["change"] for each in answer["alternatives"]} == {f"team {team}" for team in teams}


def test_operators_and_unbound_tokens_name_any_team(bound: Any) -> None:
    for number, client in enumerate((bound(), bound("vision", role=Role.OPERATOR))):
        body = {"task_id": f"t{number}", **BODY, "team": "speech"}
        assert client.post("/api/allocate", json=body).json["team"] == "speech"


def test_a_session_has_the_teams_of_its_token(service: Service, kept: Persistence) -> None:
    text = tokens.create(kept.tokens, "ada", Role.USER, teams=["vision"])
    browser = create_app(service).test_client()
    browser.post("/login", data={"token": text})
    assert browser.get("/api/caller").json["teams"] == ["vision"]  # type: ignore[index]


def test_the_command_binds_a_token_to_teams(tmp_path: Path) -> None:
    base = ["--store", "memory://", "token"]
    options = ["--tokens", str(tmp_path / "tokens.json"), "--json"]
    made = CliRunner().invoke(main, [*base, "create", "ada", "--team", "vision", "--team", "nlp", *options])
    assert made.exit_code == 0, made.output
    (listed,) = json.loads(CliRunner().invoke(main, [*base, "list", *options]).stdout)
    assert listed["teams"] == ["vision", "nlp"]
    for team in ("", " ", "a\u00adb", "x" * 251):
        refused = CliRunner().invoke(main, [*base, "create", "eve", "--team", team, *options])
        assert refused.exit_code == 2
        assert len(refused.stderr.splitlines()) == 1


def test_in_airflow_the_team_is_airflows_own_then_the_pool() -> None:
    task = SimpleNamespace(pool="gpus")
    of_airflow = {"dag_run": SimpleNamespace(team_name="vision")}
    assert team_of(task, None, of_airflow) == "vision"
    assert team_of(task, None, {"dag_run": SimpleNamespace(team_name=None)}) == "gpus"
    assert team_of(task, None, {}) == "gpus"
    assert team_of(task, "nlp", of_airflow) == "nlp"
    assert team_of(SimpleNamespace(pool="default_pool"), None, {}) == ""
