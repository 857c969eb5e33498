"""Page of a lease: what it asked for, where it is, what happened, and who may end it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.core.identifiers import job_key
from resource_manager.core.models import JobPlace
from resource_manager.core.names import short_id
from resource_manager.jobs.airflow_api import AirflowUnavailableError
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.stored_jobs import JobExit
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.agent.reporting import as_text, gpu, report
from tests.builders import granted_lease, queue_entry, redefine
from tests.manager.test_slurm_jobs import slurm_job

AsRole = Callable[..., FlaskClient]

NAME = "<b>here:d/r/'train'\"&"


@pytest.fixture
def granted(manager: GPUResourceManager) -> int:
    """Return the fencing token of ursula's lease on all of one server."""
    found = manager.submit(
        NAME, 8, 16, owner="ursula", team="vision", labels={"dag_id": "d", "run_id": "r", "task_id": "t"}
    )
    assert found["state"] == "RUNNING"
    return found["fencing_token"]


def page(client: FlaskClient, lease_id: str = NAME) -> str:
    response = client.get("/lease", query_string={"id": lease_id})
    assert response.status_code == 200
    return response.get_data(as_text=True)


def form(client: FlaskClient, text: str, action: str, **fields: object) -> tuple[int, str]:
    """Post a form with the token of the page; return status and the page that follows."""
    [csrf, *_] = re.findall(r'name="csrf_token" value="([^"]+)"', text)
    answer = client.post(action, data={"csrf_token": csrf, **fields}, follow_redirects=True)
    return answer.status_code, html.unescape(answer.get_data(as_text=True))


def test_a_lease_shows_its_request_members_and_events(granted: int, as_role: AsRole) -> None:
    raw = page(as_role(Role.READER))
    assert NAME not in raw
    text = html.unescape(raw)
    for shown in (NAME, "vision", "ursula", "dag_id=d, run_id=r, task_id=t", "0, 1, 2, 3, 4, 5, 6, 7"):
        assert shown in text, shown
    assert f"fencing token {granted}" in text
    assert "granted on " in text
    install = "Use of its GPUs: unknown until an agent reports: <code>gpu-manager agent install gpu-server-"
    assert re.search(re.escape(install) + r"\d --service URL</code>", text), "the command as it can be typed"
    assert "Stop job" not in text


def test_a_lease_is_offered_for_release_only_where_that_is_not_refused(
    granted: int, manager: GPUResourceManager, as_role: AsRole
) -> None:
    ursula = as_role(Role.USER, "ursula")

    def offered() -> list[tuple[bool, bool]]:
        shown = (page(ursula), ursula.get("/leases").get_data(as_text=True))
        return [("Stop job…" in text, "Release…" in text) for text in shown]

    assert offered() == [(True, True), (True, True)]
    manager.place_job(NAME, [JobPlace("local", machine="gpu-a", folder="/jobs")], fencing_token=granted)
    assert offered() == [(True, False), (True, False)]


def test_a_gang_of_which_a_member_cannot_be_stopped_is_not_said_to_be_released(
    manager: GPUResourceManager, as_role: AsRole
) -> None:
    redefine(manager, nodes=tuple(replace(node, address="u@near") for node in default_inventory(2)))
    found = manager.submit("gang", 2, nodes=2, owner="ursula")
    assert found["state"] == "RUNNING"
    token = found["fencing_token"]
    places = [JobPlace("local"), JobPlace("local", machine="far/1", folder="/jobs", mark="1", user="u")]
    manager.place_job("gang", places, fencing_token=token)
    ursula = as_role(Role.USER, "ursula")
    status, text = form(ursula, page(ursula, "gang"), "/act/stop", task_id="gang", fencing_token=token)
    assert status == 409
    assert "is partly released: its job may still run: rank 1 on " in text


def test_what_is_left_of_a_gang_is_stopped_and_not_the_new_lease_of_its_id(
    manager: GPUResourceManager, as_role: AsRole, service: Service
) -> None:
    redefine(manager, nodes=tuple(replace(node, address="u@near") for node in default_inventory(4)))
    old = granted_lease(manager.submit("gang", 8, nodes=2, owner="ursula"))["fencing_token"]
    manager.release_members("gang", [0], fencing_token=old)
    new = granted_lease(manager.submit("gang", 8, nodes=2, owner="ursula"))["fencing_token"]
    ursula = as_role(Role.USER, "ursula")
    leases = ursula.get("/leases").get_data(as_text=True)
    links = [html.unescape(link) for link in re.findall(r'href="([^"]+)" data-ask="stop"', leases)]
    pages = [ursula.get(link).get_data(as_text=True) for link in links]
    asks = re.compile(r'<div popover id="stop".*?name="fencing_token" value="(\d+)"')
    assert [asks.findall(each) for each in pages] == [[str(old)], [str(new)]]
    assert "QUARANTINED" in pages[0]
    assert "QUARANTINED" not in pages[1]
    for path in ("/", "/servers/1"):
        linked = re.findall(r"lease\?id=gang&amp;token=(\d+)", ursula.get(path).get_data(as_text=True))
        assert str(old) in linked, path
    status, text = form(ursula, pages[0], "/act/stop", task_id="gang", fencing_token=old)
    assert status == 200
    assert "is released" in text
    assert [lease["fencing_token"] for lease in manager.leases()] == [new]
    ended = ursula.get(links[0]).get_data(as_text=True)
    assert "It has ended" in ended
    assert "Stop job" not in ended, "the link is not one to the lease that has the id now"


def test_a_page_shows_the_use_of_its_own_lease_where_two_of_one_id_share_a_server(
    manager: GPUResourceManager, as_role: AsRole, service: Service
) -> None:
    redefine(manager, nodes=tuple(replace(node, address="u@near") for node in default_inventory(2)))
    old = granted_lease(manager.submit("gang", 4, nodes=2))["fencing_token"]
    manager.release_members("gang", [0], fencing_token=old)
    manager.submit("gang", 4, nodes=2)
    [[rest], [new]] = [
        [(each["server_name"], gpu_id) for each in lease["members"] for gpu_id in each["gpu_ids"]][-1:]
        for lease in manager.leases()
    ]
    assert rest[0] == new[0], "they share a server"
    sent = report(manager.store.now(), *map(gpu, range(8)), name=rest[0])
    service.receiver.receive(read_report(as_text(sent)))
    query = {"id": "gang", "token": old}
    text = as_role(Role.READER).get("/lease", query_string=query).get_data(as_text=True)
    used = re.findall(r'<td class="main">(\S+) GPU (\d+)</td>', text)
    assert (rest[0], str(rest[1])) in used
    assert (new[0], str(new[1])) not in used


def test_a_lease_says_which_walls_its_job_has(
    granted: int, as_role: AsRole, manager: GPUResourceManager
) -> None:
    assert "Walls around its job" not in page(as_role(Role.READER))
    place = JobPlace("ssh", machine="gpu-a", folder="/jobs", walls="none: bwrap is missing")
    manager.place_job(NAME, [place], fencing_token=granted)
    text = html.unescape(page(as_role(Role.READER)))
    assert "Walls around its job" in text
    assert "none: bwrap is missing" in text


def test_output_is_followed_by_who_may_read_it_also_after_the_end(
    granted: int, as_role: AsRole, manager: GPUResourceManager
) -> None:
    assert "data-jobs" not in page(as_role(Role.OPERATOR)), "no agent runs it"
    manager.place_job(NAME, [JobPlace("agent", machine="gpu-a", folder="/jobs")], fencing_token=granted)
    key = job_key(NAME, granted)
    for is_over in (False, True):
        assert f'"key": "{key}"' in html.unescape(page(as_role(Role.OPERATOR)))
        assert key not in page(as_role(Role.READER))
        assert (" data-live>" in page(as_role(Role.OPERATOR))) != is_over, "a job that is absent may begin"
        if not is_over:
            end: JobExit = {"exit_code": 0, "last_line": "", "ended_at": None}
            manager.release(NAME, fencing_token=granted, job_end="ended", result=end)


@pytest.mark.parametrize("reason", ["exit code 137", "ValueError"], ids=["a job", "a function that raised"])
def test_an_ended_lease_shows_the_exit_code_or_error_that_ended_it(
    granted: int, as_role: AsRole, manager: GPUResourceManager, reason: str
) -> None:
    manager.release(NAME, fencing_token=granted, outcome="FAILED", reason=reason)
    [verdict] = re.findall(r'<p class="verdict">It has ended, (.*?)</p>', page(as_role(Role.READER)))
    assert re.fullmatch(
        rf'<time data-since="[\d.]+">[\d.]+ \w+</time> ago: released: FAILED, {reason}, by .+\.', verdict
    ), verdict


def test_an_ended_lease_leads_to_its_log_in_airflow(
    granted: int, as_role: AsRole, manager: GPUResourceManager, service: Service
) -> None:
    object.__setattr__(service, "airflow_url", "http://airflow.example")
    link = '<a class="button" href="http://airflow.example/dags/d/runs/r/tasks/t" data-airflow>'
    for is_over in (False, True):
        assert link in page(as_role(Role.READER))
        if not is_over:
            manager.release(NAME, fencing_token=granted)


def test_a_pending_request_says_why_it_waits(
    granted: int, manager: GPUResourceManager, as_role: AsRole
) -> None:
    while manager.submit(f"fill-{len(manager.leases())}", 8, 1)["state"] == "RUNNING":
        pass
    manager.submit("late", 8, 1, priority=-5, team="nlp")
    text = html.unescape(page(as_role(Role.READER), "late"))
    assert queue_entry(manager.status_of("late"))["reason"] in text
    assert ">WAITING<" in text
    assert "Its start is unknown: " in text


def test_the_owner_stops_the_job_and_others_do_not(
    granted: int, manager: GPUResourceManager, as_role: AsRole
) -> None:
    other = as_role(Role.USER, "eve")
    seen = page(other)
    assert "Stop job" not in seen
    fields = {"task_id": NAME, "fencing_token": granted}
    status, text = form(other, seen, "/act/stop", **fields)
    assert (status, "is not yours" in text) == (403, True)
    ursula = as_role(Role.USER, "ursula")
    status, text = form(ursula, page(ursula), "/act/stop", task_id=NAME, fencing_token=granted + 1)
    assert (status, "does not hold this lease any more" in text) == (404, True)
    assert manager.leases()
    status, text = form(ursula, page(ursula), "/act/stop", **fields)
    assert (status, f"d.t {short_id(1)} is released: it had no job." in text) == (200, True)
    assert manager.leases() == []
    assert "released: CANCELLED" in text
    assert ">ENDED<" in text


class OneTask:
    """Airflow of one task, which it tries again."""

    def __init__(self) -> None:
        self.ended: list[TaskIdentity] = []
        self.refuses = False
        self.owner = "ursula"

    def owner_of(self, identity: TaskIdentity) -> str:
        return self.owner

    def next_try(self, identity: TaskIdentity) -> str:
        return "Airflow tries it again in 5 min"

    def end_task(self, identity: TaskIdentity, instance: str | None) -> None:
        if self.refuses:
            raise AirflowUnavailableError("Airflow refused")
        self.ended.append(identity)


def test_a_stop_asks_whether_the_task_ends_too(
    manager: GPUResourceManager, service: Service, as_role: AsRole
) -> None:
    identity = TaskIdentity("air", "d", "r", "t")
    manager.submit("mine", 8, 16, owner="ursula", labels=identity.labels)
    ursula = as_role(Role.USER, "ursula")
    assert "Airflow tries its task again if it has tries left: mark it as failed" in page(ursula, "mine")
    assert "End the task" not in page(ursula, "mine")
    airflow = OneTask()
    object.__setattr__(service, "airflow_api", lambda: airflow)
    text = page(ursula, "mine")
    assert "Airflow tries it again in 5 min." in text
    assert "Stop this run of d.t" in text
    assert "End the task" in text
    airflow.refuses = True
    [held] = manager.leases()
    fields = {"task_id": "mine", "fencing_token": held["fencing_token"], "end_task": "true"}
    status, said = form(ursula, text, "/act/stop", **fields)
    assert (status, "Airflow refused; nothing was stopped" in said) == (502, True)
    airflow.refuses = False
    assert form(ursula, text, "/act/stop", **{**fields, "fencing_token": 99})[0] == 404
    eve = as_role(Role.USER, "eve")
    assert form(eve, page(eve, "mine"), "/act/stop", **fields)[0] == 403
    manager.submit("false", 8, 16, owner="eve", labels=identity.labels)
    false = {"task_id": "false", "fencing_token": held["fencing_token"] + 1, "end_task": "true"}
    status, said = form(eve, page(eve, "false"), "/act/stop", **false)
    assert (status, "Airflow does not say that the run or the task is eve" in said) == (403, True)
    manager.submit("waits", 8, 16, owner="eve", labels=identity.labels, server="gpu-server-0")
    status, said = form(eve, page(eve, "waits"), "/act/cancel", task_id="waits", sequence=3, end_task="true")
    assert status == 403, said
    manager.cancel("waits")
    manager.release("false")
    assert (airflow.ended, len(manager.leases())) == ([], 1)
    status, said = form(ursula, text, "/act/stop", **fields)
    assert (status, "Its task has ended in Airflow, which does not try it again." in said) == (200, True)
    assert (airflow.ended, manager.leases()) == ([identity], [])


def test_a_lease_that_its_task_releases_as_it_ends_is_no_error(
    manager: GPUResourceManager, service: Service, as_role: AsRole
) -> None:
    class ReleasesAsItEnds(OneTask):
        def end_task(self, identity: TaskIdentity, instance: str | None) -> None:
            manager.release("mine")

    manager.submit("mine", 8, 16, owner="ursula", labels=TaskIdentity("air", "d", "r", "t").labels)
    ursula = as_role(Role.USER, "ursula")
    object.__setattr__(service, "airflow_api", ReleasesAsItEnds)
    [held] = manager.leases()
    fields = {"task_id": "mine", "fencing_token": held["fencing_token"], "end_task": "true"}
    status, said = form(ursula, page(ursula, "mine"), "/act/stop", **fields)
    assert (status, "is released. Its task has ended in Airflow" in said) == (200, True)


def test_what_is_not_known_is_not_found(as_role: AsRole) -> None:
    answer = as_role(Role.READER).get("/lease?id=never")
    assert answer.status_code == 404
    assert "never has no lease" in answer.get_data(as_text=True)


def test_a_lease_that_is_not_known_any_more_is_told_from_the_present_one_of_its_id(
    granted: int, as_role: AsRole
) -> None:
    answer = as_role(Role.READER).get("/lease", query_string={"id": NAME, "token": granted + 1})
    text = html.unescape(answer.get_data(as_text=True))
    assert (answer.status_code, f"no lease of {NAME} with fencing token {granted + 1} is held" in text) == (
        404,
        True,
    )


def test_the_overview_names_what_is_wrong_and_who_waits(manager: GPUResourceManager, as_role: AsRole) -> None:
    manager.drain(0, reason="<fan>", failed=True)
    while manager.submit(f"d/r/fill-{len(manager.leases())}", 8, 1, team="vision")["state"] == "RUNNING":
        pass
    raw = as_role(Role.READER).get("/").get_data(as_text=True)
    assert "<fan>" not in raw
    text = html.unescape(raw)
    assert "1 alert" in text
    assert "failed: <fan>" in text
    [waits] = manager.queue()
    name = waits["name"].replace("/", "/<wbr>").replace(".", ".<wbr>")
    assert f"vision / <bdi>{name}</bdi></a> <code>{waits['short_id']}</code> · 8 GPUs" in text
    assert manager.queue()[0]["reason"] in text


def test_an_operator_preempts_a_lease_for_who_waits_for_it(
    granted: int, manager: GPUResourceManager, as_role: AsRole
) -> None:
    assert "Preempt" not in page(as_role(Role.USER, "ursula"))
    fields = {"task_id": NAME, "fencing_token": granted}
    olga = as_role(Role.OPERATOR, "olga")
    status, text = form(olga, page(olga), "/act/preempt", **fields)
    assert (status, "nobody waits for what" in text) == (409, True)
    while manager.submit(f"late-{len(manager.leases())}", 8, 1)["state"] == "RUNNING":
        pass
    [waiting] = manager.queue()
    status, text = form(olga, page(olga), "/act/preempt", **fields)
    names = f"d.t {short_id(1)} is preempted for {name_in_words(waiting)}"
    assert f"{names}: its job has 60 s to save what it did." in text
    assert ">PREEMPTING<" in text
    assert manager.status_of(NAME)["preempted_by"] == waiting["task_id"]  # type: ignore[index,typeddict-item]
    assert "Preempt…" not in page(olga)


def test_an_event_says_who_asked_for_it_and_none_where_time_did(
    granted: int, manager: GPUResourceManager, as_role: AsRole
) -> None:
    as_role(Role.OPERATOR, "olga").post("/api/submit", json={"task_id": "late", "gpus": 8, "server": 0})
    as_role(Role.USER, "ursula").post("/api/release", json={"task_id": NAME, "outcome": "SUCCESS"})
    text = html.unescape(page(as_role(Role.READER)))
    assert "released: SUCCESS, by ursula" in text
    text = html.unescape(page(as_role(Role.READER), "late"))
    assert "queued, by olga" in text
    assert "granted on gpu-server-0, GPUs 0, 1, 2, 3, 4, 5, 6, 7</span></li>" in text, (
        "her place in the queue came"
    )


def test_jobs_on_slurm_stand_below_the_leases_and_are_searched(
    manager: GPUResourceManager, as_role: AsRole
) -> None:
    now = manager.store.now()
    waits = {"state": "PENDING", "where": "", "wait": "<its> QOS is full", "begins_at": now + 10_800.0}
    jobs = [slurm_job(7, now), slurm_job(8, now, owner="bob", **waits), slurm_job(9, now, ended_at=now)]
    manager.keep_slurm_jobs("c", jobs)
    client = as_role(Role.READER)
    raw = client.get("/leases").get_data(as_text=True)
    assert "<its>" not in raw
    text = html.unescape(raw)
    for shown in (
        "7 in gpu",
        "n1 GPU 0-1",
        "8 in gpu",
        "<its> QOS is full; Slurm expects the start in 3.0 h",
    ):
        assert shown in text, shown
    assert "9 in gpu" not in text
    found = client.get("/leases?q=bob").get_data(as_text=True)
    assert ("7 in gpu" in found, "8 in gpu" in found) == (False, True)
    [listed, *_] = client.get("/api/slurm").get_json()["items"]
    assert (listed["source"], listed["cluster"]) == ("slurm", "c")


def test_of_many_jobs_on_slurm_a_page_shows_the_first(manager: GPUResourceManager, as_role: AsRole) -> None:
    """Each open page asks for them at each change; a user may tell of tens of thousands."""
    now = manager.store.now()
    manager.keep_slurm_jobs("c", [slurm_job(number, now) for number in range(130)])
    text = as_role(Role.READER).get("/leases").get_data(as_text=True)
    assert text.count(" in gpu</td>") == 100
    assert "30 more: search above, or list all with <code>gpu-manager leases</code>" in text
    assert "129 in gpu" in as_role(Role.READER).get("/leases?q=t/129").get_data(as_text=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 10**400},
        {"nodes": 10**7},
        {"gpus": -1},
        {"nodes": -(10**400)},
        {"exit_code": 2**63},
        {"exit_code": -(2**63)},
        {"submitted_at": 1e308},
        {"ended_at": -1.0},
        {"owner": "a\u202eb"},
        {"labels": {"a\nb": ""}},
    ],
    ids=str,
)
def test_no_job_on_slurm_breaks_a_report_or_forges_a_line(as_role: AsRole, wrong: dict[str, object]) -> None:
    """Anybody who may submit tells of such jobs, and the accounts of all have them."""
    job = slurm_job(7, 1e9)
    client = as_role(Role.USER)
    answer = client.post("/api/slurm", json={"cluster": "c", "jobs": [{**job, **wrong}]})
    assert answer.status_code == 400, answer.text
    assert client.post("/api/slurm", json={"cluster": "c", "jobs": [job]}).status_code == 200
    for path in ("/use", "/api/report", "/leases"):
        assert client.get(path).status_code == 200


def test_a_page_of_nothing_leads_on_to_the_others(as_role: AsRole) -> None:
    answer = as_role(Role.READER).get("/lease", query_string={"id": "nobody"})
    text = answer.get_data(as_text=True)
    assert (answer.status_code, "nobody has no lease" in text, '<a href="/queue">Queue</a>' in text) == (
        404,
        True,
        True,
    )
