"""Routes of jobs that agents run: whose agent may ask, who may have jobs run, who may read their output."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, __version__
from resource_manager.core.models import RUNS_JOBS, Gpu, JobPlace, Node
from resource_manager.fleet.job_board import JobBoard, JobsAnswer
from resource_manager.jobs.directories.job_files import LOG_CHUNK_BYTES
from resource_manager.jobs.launchers import JobState, LauncherError, LauncherUnreachableError, job_key
from resource_manager.jobs.launchers.agent import AgentLauncher
from resource_manager.jobs.running_job import RunningJob
from resource_manager.manager.agent_jobs import note_opened
from resource_manager.manager.stored_jobs import JobExit, Question
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.limits import DEFAULT_THREADS
from resource_manager.rest.tokens import Role, TokenError
from tests.agent.reporting import as_text, gpu, report
from tests.builders import granted_lease, json_of
from tests.eventually import wait_for
from tests.listening import served

PLACE = {"machine": "gpu-a/1", "folder": "/jobs", "mark": "m", "user": "train"}
DEMAND = {"task_id": "t", "gpus": 1}
JOB = {"command": ["true"]}

As = Callable[..., FlaskClient]

RUNNING = {"state": "running", "exit_code": None, "ended_at": None, "checkpoint_at": None, "preempted": False}


def part(text: str, /, **more: Any) -> dict[str, Any]:
    """Return a part of the output of a job that runs, as its agent brings it."""
    return {"text": text, "offset": len(text), "is_all": True, "status": RUNNING, **more}


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    user = pwd.getpwuid(os.geteuid()).pw_name
    nodes = [
        Node(name, n, {"cpus": 16}, gpus(2), labels=RUNS_JOBS, job_user=user)
        for n, name in enumerate(("gpu-a", "gpu-b"))
    ]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        yield manager


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(number, "A100") for number in range(count))


@pytest.fixture
def as_(manager: GPUResourceManager, kept: Persistence) -> Iterator[As]:
    """Return as_("ada", run_jobs=True): a client with a token of that name and these rights."""
    service = standalone(manager, kept)
    app = create_app(service)

    def client(name: str, role: Role = Role.USER, **rights: Any) -> FlaskClient:
        made = app.test_client()
        text = tokens.create(kept.tokens, name, role, **rights)
        made.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
        return made

    yield client
    service.watch.close()


def agent(as_: As, server: str = "gpu-a") -> FlaskClient:
    return as_(f"agent of {server}", Role.AGENT, server=server)


def ask(client: FlaskClient, server: str = "gpu-a", **query: Any) -> Any:
    return client.get("/api/agent/jobs", query_string={"server": server, "version": __version__, **query})


def tell(client: FlaskClient, manager: GPUResourceManager) -> None:
    value = report(manager.store.now(), gpu(0), place=PLACE, runs=[])
    assert (
        client.post("/api/reports", data=as_text(value), content_type="application/json").status_code == 200
    )


def test_jobs_are_run_for_holders_of_such_a_token_only(as_: As, kept: Persistence) -> None:
    refused = as_("ada").post("/api/submit", json={**DEMAND, "job": JOB})
    assert refused.status_code == 403
    assert "agents run no jobs for ada: gpu-manager token create ada --run-jobs" in json_of(refused)["detail"]
    assert as_("bob").post("/api/submit", json=DEMAND).status_code == 200, "without a job"
    answer = as_("eve", run_jobs=True).post("/api/submit", json={"task_id": "u", "gpus": 1, "job": JOB})
    assert json_of(answer)["labels"] == {"job": "stored"}
    with pytest.raises(TokenError, match="a token of role reader runs no jobs"):
        tokens.create(kept.tokens, "x", Role.READER, run_jobs=True)


def test_a_request_that_comes_again_with_another_job_is_refused(as_: As) -> None:
    ada = as_("ada", run_jobs=True)
    first, again = (ada.post("/api/submit", json={**DEMAND, "job": JOB}) for _ in range(2))
    assert json_of(again)["fencing_token"] == json_of(first)["fencing_token"]
    other = ada.post("/api/submit", json={**DEMAND, "job": {"command": ["false"]}})
    assert (other.status_code, json_of(other)["task_id"]) == (409, "t")
    assert "already waits or runs, and not with this job" in json_of(other)["detail"]


@pytest.mark.parametrize("path", ["allocate", "submit", "announce"])
def test_a_caller_without_the_right_cannot_name_the_stored_job_of_another(as_: As, path: str) -> None:
    refused = as_("eve").post(f"/api/{path}", json={**DEMAND, "labels": {"job": "stored"}})
    assert (refused.status_code, json_of(refused)["errors"][0]["field"]) == (400, "labels")
    assert "labels may not have job=stored" in json_of(refused)["detail"]


def test_an_agent_asks_for_its_own_server_only(as_: As, manager: GPUResourceManager) -> None:
    mine, other = agent(as_), agent(as_, "gpu-b")
    tell(mine, manager)
    as_("ada", run_jobs=True).post("/api/submit", json={**DEMAND, "server": "gpu-a", "job": JOB})
    known = ask(mine).json["known"]
    assert [item["want"] for item in ask(mine, known=known).json["jobs"]] == ["run"]
    assert ask(other).status_code == 403
    assert ask(as_("eve")).status_code == 403
    body = {"server": "gpu-a", "key": job_key("t", 1), "n": "1", "part": part("")}
    assert other.post("/api/agent/logs", json=body).status_code == 403


def test_an_agent_of_another_version_is_refused_with_both_numbers(as_: As) -> None:
    for version in ("0.0.9", "99.1.0", ""):
        answer = ask(agent(as_), version=version)
        assert answer.status_code == 409
        assert re.search(rf"{version or 'no version'} and the service {__version__}", answer.json["detail"])


def test_nothing_new_is_told_by_the_hash(as_: As, manager: GPUResourceManager) -> None:
    mine = agent(as_)
    known = ask(mine).json["known"]
    assert ask(mine, known=known).json == {"known": known}
    assert ask(mine, known="other").json["jobs"] == []


def test_a_question_whose_time_is_over_looks_at_nothing_again(
    manager: GPUResourceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    jobs = JobBoard.jobs

    def counted(board: JobBoard, server: str, known: str) -> JobsAnswer:
        seen.append(server)
        return jobs(board, server, known)

    monkeypatch.setattr(JobBoard, "jobs", counted)
    with served(manager, tmp_path, 2) as url:
        path = f"{url}/api/agent/jobs?server=gpu-a&version={__version__}"
        known = httpx.get(path).json()["known"]
        answer = httpx.get(f"{path}&known={known}&wait=1", timeout=30).json()
    assert (answer, seen) == ({"known": known}, ["gpu-a", "gpu-a"])


def test_output_is_for_owner_team_and_operator(
    as_: As, manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(agent(as_), manager)
    body = {**DEMAND, "server": "gpu-a", "team": "vision", "job": JOB}
    token = json_of(as_("ada", run_jobs=True).post("/api/submit", json=body))["fencing_token"]
    tell(agent(as_), manager)  # the job gets its place
    key = job_key("t", token)
    query = {"server": "gpu-a", "key": key}
    answer = as_("eve").get("/api/jobs/output", query_string=query)
    assert (answer.status_code, json_of(answer)["detail"]) == (
        403,
        "a job's output is for its owner, their team and operators",
    )
    ended: JobExit = {"exit_code": 0, "last_line": "", "ended_at": None}
    monkeypatch.setattr("resource_manager.manager.agent_jobs.OUTPUT_TIMEOUT_S", 0.0)
    asked = {**query, "task_id": "t"}
    for while_it_runs in (True, False):
        for client, may_read in (
            (as_("eve"), False),
            (as_("bob", teams=["vision"]), True),
            (as_("ada"), True),
            (as_("root", Role.OPERATOR), True),
        ):
            status = 503 if may_read else 403  # no agent answers here
            assert client.get("/api/jobs/output", query_string=asked).status_code == status
            if not while_it_runs:
                result = client.get("/api/result", query_string={"task_id": "t"})
                assert result.status_code == (200 if may_read else 404)
        if while_it_runs:
            manager.release("t", fencing_token=token, job_end="ended", result=ended)
    assert as_("ada").get("/api/jobs/output", query_string=query).status_code == 404
    other = {**asked, "key": job_key("t", token + 1)}
    assert as_("ada").get("/api/jobs/output", query_string=other).status_code == 404


def test_the_result_of_who_used_a_lease_id_before_is_still_theirs_to_read(
    as_: As, manager: GPUResourceManager
) -> None:
    ended: JobExit = {"exit_code": 4, "last_line": "", "ended_at": None}
    for owner in ("ada", "bob"):
        token = granted_lease(manager.submit("t", 1, owner=owner, job=JOB))["fencing_token"]
        manager.release("t", fencing_token=token, result=ended)
    callers = {"ada": Role.USER, "bob": Role.USER, "eve": Role.USER, "root": Role.OPERATOR}
    asked = {"query_string": {"task_id": "t"}}
    results = {name: as_(name, role).get("/api/result", **asked) for name, role in callers.items()}
    owners = {name: json_of(result).get("owner") for name, result in results.items()}
    assert owners == {"ada": "ada", "bob": "bob", "eve": None, "root": "bob"}


def test_who_waits_for_the_output_of_many_jobs_may_ask_for_other_things(
    as_: As, manager: GPUResourceManager
) -> None:
    tell(agent(as_), manager)
    body = {**DEMAND, "server": "gpu-a", "job": JOB}
    token = json_of(as_("ada", run_jobs=True).post("/api/submit", json=body))["fencing_token"]
    tell(agent(as_), manager)  # the job gets its place
    query = {"server": "gpu-a", "key": job_key("t", token)}

    def output() -> int:
        return as_("ada").get("/api/jobs/output", query_string=query).status_code

    with ThreadPoolExecutor(DEFAULT_THREADS) as pool:
        waiting = [pool.submit(output) for _ in range(DEFAULT_THREADS // 4)]
        try:
            wait_for(lambda: len(manager.stored_jobs.questions("gpu-a")) == DEFAULT_THREADS // 8)
            wait_for(lambda: sum(each.done() for each in waiting) == DEFAULT_THREADS // 8)
            assert as_("ada").get("/api/status").status_code == 200
        finally:
            for question in manager.stored_jobs.questions("gpu-a"):
                manager.stored_jobs.keep_output("gpu-a", question, part("x"))
        statuses = sorted(each.result() for each in waiting)
    half = DEFAULT_THREADS // 8
    assert statuses == [200] * half + [429] * half


def test_an_agent_answers_the_questions_of_its_own_server_only(as_: As, manager: GPUResourceManager) -> None:
    mine, other, jobs = agent(as_), agent(as_, "gpu-b"), manager.stored_jobs
    question: Question = {"key": job_key("t", 1), "offset": 0, "n": "1"}
    jobs.ask("gpu-a", question)
    jobs.ask("gpu-a", question)
    assert ask(mine).json["output"] == [question]
    answer = {**question, "server": "gpu-a", "part": part("x")}
    del answer["offset"]
    assert other.post("/api/agent/logs", json={**answer, "server": "gpu-b"}).status_code == 200
    assert mine.post("/api/agent/logs", json={**answer, "key": job_key("u", 2)}).status_code == 200
    assert jobs.output(question) is None, "it is not the answer to this question"
    assert mine.post("/api/agent/logs", json=answer).status_code == 200
    assert jobs.output(question) == part("x")
    assert ask(mine).json["output"] == []


@pytest.mark.parametrize("character", ["x", "\0", "\ufffd"])
def test_a_whole_part_of_an_output_is_taken_whatever_it_has(
    as_: As, manager: GPUResourceManager, character: str
) -> None:
    question: Question = {"key": job_key("t", 1), "offset": 0, "n": "1"}
    manager.stored_jobs.ask("gpu-a", question)
    whole = part(character * LOG_CHUNK_BYTES)
    body = {"server": "gpu-a", "key": question["key"], "n": "1", "part": whole}
    assert agent(as_).post("/api/agent/logs", json=body).status_code == 200
    assert manager.stored_jobs.output(question) == whole


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"text": "x"},
        {"error": 5},
        {"error": "x" * 1000},
        {"error": "no", **part("x")},
        part("x", text=5),
        part("x" * (LOG_CHUNK_BYTES + 1000)),
        part("x", offset="0&key=other"),
        part("x", offset=-1),
        part("x", is_all=None),
        part("x", status={}),
        part("x", status={**RUNNING, "state": "?"}),
        part("x", status={**RUNNING, "ended_at": 1e308}),
        part("x", status={**RUNNING, "exit_code": 2**63}),
    ],
    ids=lambda lie: str(lie)[:60],
)
def test_a_lying_agent_breaks_no_reader_of_its_output(
    as_: As, manager: GPUResourceManager, lie: dict[str, Any]
) -> None:
    question: Question = {"key": job_key("t", 1), "offset": 0, "n": "1"}
    manager.stored_jobs.ask("gpu-a", question)
    body = {"server": "gpu-a", "key": question["key"], "n": "1", "part": lie}
    assert agent(as_).post("/api/agent/logs", json=body).status_code == 400
    assert manager.stored_jobs.output(question) is None


def ordered(client: FlaskClient, task: str, length: int) -> tuple[dict[str, Any], Any]:
    """Get a hundredth of a GPU for a task; return an order for its job, and the answer to it."""
    demand = {"task_id": task, "gpus": 1, "gpu_milli": 10, "cpus": 1, "server": "gpu-a"}
    token = json_of(client.post("/api/allocate", json=demand))["fencing_token"]
    spec = {**JOB, "environment": {"X": "x" * length}}
    order = {"server": "gpu-a", "key": job_key(task, token), "order": {"want": "prepare", "spec": spec}}
    return order, client.post("/api/jobs/order", json=order)


def test_orders_of_leases_that_come_and_go_fill_no_store(as_: As, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource_manager.manager.stored_jobs.MAX_BYTES_OF_CALLER", 2**20)
    eve = as_("eve", run_jobs=True)
    statuses = []
    for number in range(12):
        _, answer = ordered(eve, f"t{number}", 100_000)
        statuses.append(answer.status_code)
        eve.post("/api/release", json={"task_id": f"t{number}"})
    assert statuses == [200] * 10 + [429] * 2
    submitted = eve.post("/api/submit", json={**DEMAND, "job": {"command": ["x" * 60_000]}})
    for refused in (answer, submitted):
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
        assert json_of(refused)["detail"].startswith(
            "the jobs of eve have 1 MiB already, each until a day after"
        )
    assert ordered(as_("ada", run_jobs=True), "t", 60_000)[1].status_code == 200


def test_long_jobs_of_one_owner_keep_no_other_job_from_its_agent(
    as_: As, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource_manager.fleet.job_shares.FEW", 2)
    monkeypatch.setattr("resource_manager.fleet.job_shares.MAX_SPEC_BYTES", 50_000)
    eve, ada = (as_(name, run_jobs=True) for name in ("eve", "ada"))
    orders = [ordered(eve, f"e{number}", 10_000)[0] for number in range(9)]
    order, _ = ordered(ada, "a", 10_000)
    mine = agent(as_)
    assert [item["key"] for item in ask(mine).json["jobs"]] == [
        each["key"] for each in (*orders[:2], order)
    ], "of each owner the oldest"
    assert eve.post("/api/jobs/order", json={**orders[8], "order": {"want": "stop"}}).status_code == 200
    assert ask(mine).json["jobs"][2]["key"] == orders[8]["key"], "what ends a job is short"


def test_orders_are_for_the_owner_of_the_lease(as_: As, manager: GPUResourceManager) -> None:
    tell(agent(as_), manager)
    body = {**DEMAND, "server": "gpu-a", "job": JOB}
    token = json_of(as_("ada", run_jobs=True).post("/api/submit", json=body))["fencing_token"]
    order = {"server": "gpu-a", "key": job_key("t", token), "order": {"want": "stop"}}
    assert as_("eve", run_jobs=True).post("/api/jobs/order", json=order).status_code == 403
    assert as_("ada").post("/api/jobs/order", json=order).status_code == 403, "without --run-jobs"
    assert as_("ada", run_jobs=True).post("/api/jobs/order", json=order).status_code == 200
    wrong = {**order, "key": job_key("t", token + 1)}
    assert as_("ada", run_jobs=True).post("/api/jobs/order", json=wrong).status_code == 404


def test_an_agent_runs_a_submitted_job_and_its_output_is_followed(
    manager: GPUResourceManager, tmp_path: Path
) -> None:
    """The agent is a process of its own, and reaches the service over HTTP alone."""
    with served(manager, tmp_path, 4) as url, ServiceClient(url) as client:
        environment = {**os.environ, "GPU_MANAGER_JOBS_DIR": str(tmp_path / "jobs"), "HOME": str(tmp_path)}
        options = ("--server", "gpu-a", "--run-jobs")
        command = [sys.executable, "-m", "resource_manager.cli", "agent", *options]
        with subprocess.Popen(
            [*command, "--url", url], env=environment, stderr=subprocess.DEVNULL
        ) as process:
            try:
                wait_for(lambda: client.agent_state("gpu-a")["place"] is not None)
                begin = tmp_path / "go"
                script = f"echo first; while [ ! -e {begin} ]; do sleep 0.05; done; echo last; exit 4"
                job = {"command": ["/bin/sh", "-c", script]}
                lease: Any = client.submit("t", 1, server="gpu-a", job=job)
                wait_for(lambda: granted_lease(client.status_of("t"))["job_places"])
                [running] = RunningJob.all_of(granted_lease(client.status_of("t")))
                launcher = running.open()
                wait_for(lambda: launcher.logs(running.key).text == "first\n")
                begin.touch()
                asked_at = time.monotonic()
                wait_for(lambda: client.result_of("t", lease["fencing_token"]) is not None)
                assert time.monotonic() - asked_at < 10
                found = client.result_of("t", lease["fencing_token"])
                assert found is not None
                assert (found["exit_code"], found["last_line"]) == (4, "last")
                assert client.status_of("t") is None
                at_url = [sys.executable, "-m", "resource_manager.cli", "--url", url]
                for arguments, shown in (
                    (("logs", "t"), "first\nlast\n"),
                    (("status", "t"), r"t ended at \d\d:\d\d with exit code 4 \(FAILED\): last\n"),
                ):
                    done = subprocess.run([*at_url, *arguments], capture_output=True, text=True)
                    assert re.fullmatch(shown, done.stdout), done
                script = "echo u; trap 'echo saved; exit 9' TERM; while :; do sleep 0.1; done"
                client.submit("u", 1, server="gpu-a", job={"command": ["/bin/sh", "-c", script]})
                wait_for(lambda: granted_lease(client.status_of("u"))["job_places"])
                [running] = RunningJob.all_of(granted_lease(client.status_of("u")))
                wait_for(lambda: running.open().logs(running.key).text == "u\n")
                for arguments, shown in (
                    (("stop", "u"), r"u \w+: released, its job was stopped\n"),
                    (("logs", "u"), r"u\n(Terminated\n)?saved\n"),
                    (("status", "u"), r"u ended at \d\d:\d\d with exit code 9 \(CANCELLED\): saved\n"),
                ):
                    done = subprocess.run([*at_url, *arguments], capture_output=True, text=True)
                    assert re.fullmatch(shown, done.stdout), done
            finally:
                process.terminate()


def test_the_job_of_another_is_unknown_and_never_taken_for_gone(
    as_: As, manager: GPUResourceManager, tmp_path: Path
) -> None:
    body = {**DEMAND, "server": "gpu-a", "job": JOB}
    token = json_of(as_("ada", run_jobs=True).post("/api/submit", json=body))["fencing_token"]
    key = job_key("t", token)
    run = {"key": key, "n": "1", "want": "run", "error": None, "refusal": None, **RUNNING}
    run |= {"began": True, "last_line": "", "ended": False, "walls": ""}
    value = report(manager.store.now(), gpu(0), place=PLACE, runs=[run])
    told = agent(as_).post("/api/reports", data=as_text(value), content_type="application/json")
    assert told.status_code == 200, told.json

    def seen_by(client: FlaskClient) -> Any:
        return client.get("/api/jobs", query_string={"server": "gpu-a"}).json

    assert seen_by(as_("ada"))["runs"][key]["state"] == "running"
    assert seen_by(as_("op", Role.OPERATOR))["runs"][key]["state"] == "running"
    of_eve = seen_by(as_("eve"))
    assert of_eve["runs"] == {key: {"state": "unknown"}}

    class OfEve:
        agent_state = staticmethod(lambda server: of_eve)

    note_opened(opened := OfEve())  # type: ignore[arg-type]  # the launcher asks it for nothing else
    assert opened
    launcher = AgentLauncher(JobPlace("agent", "gpu-a"))
    with pytest.raises(LauncherUnreachableError, match=rf"^job {key} of gpu-a is unknown to this caller"):
        launcher.status(key)
    assert launcher.running() == [key], "a search for jobs must not take the server for empty"
    assert launcher.status(job_key("t", token + 1)).state is JobState.ABSENT


@pytest.mark.parametrize("machine", ["", "gpu-a/1"])
def test_an_agent_that_runs_no_jobs_now_leaves_it_unknown_whether_a_placed_one_runs(machine: str) -> None:
    """As one that was started without --run-jobs by mistake: the job that another began goes on."""

    class Opened:
        agent_state = staticmethod(
            lambda server: {"server": server, "place": None, "runs": {}, "is_silent": False}
        )

    note_opened(opened := Opened())  # type: ignore[arg-type]  # the launcher asks it for nothing else
    assert opened
    launcher = AgentLauncher(JobPlace("agent", "gpu-a", machine=machine, folder="/jobs", mark="m"))
    with pytest.raises(LauncherError, match="runs no jobs: start gpu-manager agent --run-jobs") as raised:
        launcher.status(job_key("t", 1))
    assert isinstance(raised.value, LauncherUnreachableError) is bool(machine)
