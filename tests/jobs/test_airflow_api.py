"""Airflow's REST API as used by `gpu-manager reconcile`, over real HTTP."""

import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.cli import main
from resource_manager.jobs.airflow_api import AirflowTaskStates, AirflowUnavailableError, NextTries
from resource_manager.jobs.task_identity import MAX_NAMES_LENGTH, TaskIdentity, runs_and_tasks
from tests.builders import node

NOTHING = {"actions": [], "other_instances": 0}


class Airflow(BaseHTTPRequestHandler):
    """HTTP handler that answers like Airflow 3.3."""

    server: Any
    TASKS = "/api/v2/dags/d/dagRuns/r%2B1/taskInstances"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/v2/dags/~/dagRuns/~/taskInstances/list":
            return self.list_tasks(body)
        if self.path.startswith("/proxy"):
            return self.answer(404, "not here", "text/html")
        self.server.logins += 1
        if self.server.token is None:
            return self.answer(503, {"detail": "still starting"})
        if body != {"username": "u", "password": "p"}:
            return self.answer(401, {"detail": "Invalid credentials"})
        return self.answer(201, {"access_token": f"token-{self.server.logins}"})

    def list_tasks(self, body):
        self.server.lists += 1
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(401, {"detail": "Invalid JWT token"})
        if self.server.list_status != 200:
            return self.answer(self.server.list_status, {"detail": "Forbidden"})
        of_dag = [each for each in self.server.tasks if each["dag_id"] in body["dag_ids"]]
        of_runs = [each for each in of_dag if each["dag_run_id"] in body["dag_run_ids"]]
        found = [each for each in of_runs if each["task_id"] in body["task_ids"]]
        page = found[body["page_offset"] :][: min(body["page_limit"], 100)]
        return self.answer(200, {"task_instances": page, "total_entries": len(found)})

    def do_GET(self):
        self.server.reads.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(401, {"detail": "Invalid JWT token"})
        answers = {
            f"{self.TASKS}/runs": {"state": "deferred"},
            f"{self.TASKS}/ended": {"state": "failed"},
            f"{self.TASKS}/cleared": {"state": None},
            f"{self.TASKS}/mapped/3": {"state": "running"},
            "/api/v2/dags/d/dagRuns/r%2B1": {"state": "running", "triggering_user_name": self.server.user},
            f"{self.TASKS}/first": {"state": "running", "try_number": 1, "max_tries": 1},
            f"{self.TASKS}/last": {"state": "running", "try_number": 2, "max_tries": 1},
            "/api/v2/dags/d/tasks/first": {
                "owner": "eve",
                "retry_delay": {"days": 0, "seconds": 300, "microseconds": 0},
            },
            "/api/v2/dags/d/tasks/last": {"retry_delay": {"days": 0, "seconds": 300, "microseconds": 0}},
        }
        if self.path == "/api/v2/variables/gpu_manager_instance":
            return self.answer(*self.server.variable)
        if self.path in answers:
            return self.answer(200, answers[self.path])
        if self.path.startswith("/proxy"):
            return self.answer(404, "not here", "text/html")
        return self.answer(404, {"detail": "not found"})

    def do_PATCH(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.patched.append((self.path, body))
        self.server.at_patch()
        self.answer(self.server.patch_status, {"task_instances": []})

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def airflow():
    api: Any = HTTPServer(("127.0.0.1", 0), Airflow)
    with api as server:
        server.logins, server.token = 0, "token-1"
        server.patched, server.patch_status, server.user = [], 200, "ada"
        server.at_patch = lambda: None
        server.lists, server.list_status, server.reads = 0, 200, []
        server.tasks = [listed("runs", "deferred"), listed("ended", "failed"), listed("cleared", None)]
        server.variable = 200, {"key": "gpu_manager_instance", "value": "staging"}
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


def listed(task_id, state, run_id="r+1", map_index=-1):
    """Return a task instance as Airflow lists it."""
    return {
        "dag_id": "d",
        "dag_run_id": run_id,
        "task_id": task_id,
        "map_index": map_index,
        "state": state,
        "try_number": 1,
    }


def tasks(*names):
    return {TaskIdentity("staging", "d", "r+1", name) for name in names} | {
        TaskIdentity("staging", "d", "r+1", "mapped", 3)
    }


def test_unfinished_tasks_are_told_from_ended_and_missing_ones(airflow):
    states = AirflowTaskStates(airflow.url, user="u", password="p")
    assert states.unfinished(tasks("runs", "ended", "cleared", "gone")) == tasks("runs", "cleared")
    assert states.run_is_unfinished("d", "r+1")
    assert not states.run_is_unfinished("d", "gone")
    assert airflow.lists == 1
    assert sorted(path.rpartition("/")[2] for path in airflow.reads[:-2]) == ["3", "gone"], "not listed"


def test_hundreds_of_tasks_are_one_question_for_each_page(airflow):
    """500 announced tasks in 100 runs of five."""
    airflow.tasks = [listed(f"t{n % 5}", None, f"run{n // 5}") for n in range(500)]
    asked = {TaskIdentity("staging", "d", f"run{n // 5}", f"t{n % 5}") for n in range(500)}
    assert AirflowTaskStates(airflow.url, token="token-1").unfinished(asked) == asked
    assert (airflow.lists, airflow.reads) == (5, [])


def test_names_that_an_address_cannot_hold_come_in_parts():
    runs = [f"{n:03}{'ä' * 80}" for n in range(20)]
    parts = [*runs_and_tasks(TaskIdentity("i", "d", run, task) for run in runs for task in "ab")]
    assert sorted(run for _, of_part, _ in parts for run in of_part) == runs
    assert all(tasks == ["a", "b"] for _, _, tasks in parts)
    assert all(len(quote("".join(of_part))) <= MAX_NAMES_LENGTH for _, of_part, _ in parts)
    assert len(parts) == 4


def test_a_list_that_this_user_may_not_read_is_no_list_of_missing_tasks(airflow):
    airflow.list_status = 403
    states = AirflowTaskStates(airflow.url, token="token-1")
    assert states.unfinished(tasks("runs", "ended")) == tasks("runs")
    assert len(airflow.reads) == 3, "each by itself"
    airflow.list_status, airflow.tasks = 200, []
    assert states.unfinished(tasks("runs", "ended")) == tasks("runs"), "those of DAGs that are not shown"


def test_an_expired_token_is_renewed(airflow):
    states = AirflowTaskStates(airflow.url, user="u", password="p")
    airflow.token = "token-2"
    assert states.unfinished(tasks("runs")) == tasks("runs")
    assert airflow.logins == 2


def test_a_wrong_address_or_login_is_not_taken_for_a_missing_task(airflow):
    with pytest.raises(AirflowUnavailableError, match="answered 404"):
        AirflowTaskStates(f"{airflow.url}/proxy", token="token-1").unfinished(tasks("runs"))
    with pytest.raises(AirflowUnavailableError, match="answered 401"):
        AirflowTaskStates(airflow.url, token="wrong").unfinished(tasks("runs"))
    with pytest.raises(AirflowUnavailableError, match="refused the login"):
        AirflowTaskStates(airflow.url, user="u", password="wrong")  # pragma: allowlist secret


def test_the_command_tries_again_if_airflow_does_not_answer(airflow, monkeypatch):
    naps, sleep = [], time.sleep

    def nap(seconds):
        if seconds != 7.0:
            sleep(seconds)  # of a thread that another test left behind
            return
        naps.append(seconds)
        airflow.token = f"token-{airflow.logins + 1}"
        if len(naps) == 2:
            raise SystemExit(0)

    monkeypatch.setattr(time, "sleep", nap)
    airflow.token = None
    words = ["--airflow-url", airflow.url, "--airflow-user", "u", "--airflow-password", "p"]
    done = CliRunner().invoke(main, ["--store", "memory://", "reconcile", *words, "--every", "7", "--json"])
    assert (done.exit_code, naps) == (0, [7.0, 7.0])
    assert json.loads(done.stdout) == NOTHING, "the first attempt has no result"
    assert done.stderr.endswith("refused the login with status 503; trying again\n")
    assert done.stderr.count("\n") == 1


def test_the_command_prints_its_actions_or_the_error(airflow):
    def run(*words):
        return CliRunner().invoke(main, ["--store", "memory://", "reconcile", *words])

    done = run("--airflow-url", airflow.url, "--airflow-user", "u", "--airflow-password", "p")
    said = "nothing to do: every lease of this Airflow belongs to an unfinished task\n"
    assert (done.exit_code, done.stdout) == (0, said)
    done = run("--airflow-url", airflow.url, "--airflow-token", "token-1", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, NOTHING)
    login = ["http://127.0.0.1:1", "--airflow-user", "u"]
    for words, exit_code in ((["gpus"], 2), (login, 2), ([*login, "--airflow-password", "p"], 3)):
        done = run("--airflow-url", *words)
        assert done.exit_code == exit_code
        assert done.stderr.count("\n") == 1
    done = run("--airflow-url", *login)
    assert done.stderr.strip() == "Error: --airflow-password is missing: --airflow-user is 'u'"


def task(name, map_index=-1, instance="staging"):
    return TaskIdentity(instance, "d", "r+1", name, map_index)


def test_an_unfinished_task_is_ended_so_that_airflow_does_not_try_it_again(airflow):
    states = AirflowTaskStates(airflow.url, token="token-1")
    states.end_task(task("first"))
    states.end_task(task("mapped", 3), "staging")
    states.end_task(task("ended"))
    states.end_task(task("gone"))
    assert airflow.patched == [
        (f"{Airflow.TASKS}/first", {"new_state": "failed"}),
        (f"{Airflow.TASKS}/mapped/3", {"new_state": "failed"}),
    ]
    with pytest.raises(AirflowUnavailableError, match=r"of the Airflow 'other'; http.* is 'staging'"):
        states.end_task(task("first", instance="other"))
    airflow.variable = 403, {"detail": "Forbidden"}
    with pytest.raises(AirflowUnavailableError, match="none that tells this user its instance id"):
        states.end_task(task("first"))
    airflow.patch_status = 403
    with pytest.raises(AirflowUnavailableError, match="refused with status 403 to end the task"):
        states.end_task(task("first"), "staging")


def test_a_task_is_of_who_triggered_its_run_or_else_of_its_owner(airflow):
    states = AirflowTaskStates(airflow.url, token="token-1")
    assert states.owner_of(task("first")) == "ada"
    airflow.user = None
    assert states.owner_of(task("first")) == "eve"
    assert states.owner_of(task("gone")) == ""


def test_what_airflow_does_next_is_asked_once_a_lease(airflow):
    tries, entry = NextTries(), {"task_id": "t", "fencing_token": 1}
    open_api = partial(AirflowTaskStates, airflow.url, token="token-1")
    assert tries.of(entry, task("first"), open_api) == "Airflow tries it again in 5 min"
    assert tries.of(entry, task("last"), open_api) == "Airflow tries it again in 5 min", "known"
    assert tries.of({**entry, "fencing_token": 2}, task("last"), open_api) == "Airflow does not try it again"
    waits = {"task_id": "t", "sequence": 7}
    assert tries.of(waits, task("first"), open_api) == "Airflow tries it again in 5 min"
    assert tries.of({**waits, "sequence": 8}, task("last"), open_api) == "Airflow does not try it again"
    closed = partial(AirflowTaskStates, "http://127.0.0.1:1", token="t")
    assert tries.of({"task_id": "other"}, task("first"), closed).endswith("if it has tries left")


def test_stop_with_end_task_ends_the_task_first_or_nothing(airflow, tmp_path, monkeypatch):
    monkeypatch.delenv("GPU_MANAGER_INSTANCE", raising=False)
    store = f"sqlite:///{tmp_path}/state"
    with GPUResourceManager.from_url(store, inventory=[node("a")]) as manager:
        manager.submit("mine", 1, labels=task("first").labels)
        manager.submit("by hand", 1)

    def stop(name, *words):
        done = CliRunner().invoke(main, ["--store", store, "stop", name, *words])
        return done.exit_code, done.output

    login = ("--airflow-url", airflow.url, "--airflow-token", "token-1", "--end-task")
    code, said = stop("mine", "--end-task")
    assert (code, "set --airflow-url, --airflow-user and --airflow-password, or" in said) == (2, True)
    code, said = stop("mine", *login[:2], "--end-task")
    assert (code, "set --airflow-user and --airflow-password, or" in said) == (2, True), "only what lacks"
    code, said = stop("by hand", *login)
    assert (code, "is no single task of Airflow" in said) == (2, True)
    airflow.patch_status = 403
    code, said = stop("mine", *login)
    assert (code, "nothing was stopped" in said) == (3, True)
    airflow.patch_status = 200
    code, said = stop("mine", *login)
    assert (code, "released, it had no job" in said, "may try" in said) == (0, True, False)
    assert airflow.patched[-1] == (f"{Airflow.TASKS}/first", {"new_state": "failed"})
    with GPUResourceManager.from_url(store) as manager:
        manager.submit("mine", 1, labels=task("first").labels)
        airflow.at_patch = lambda: manager.release("mine")  # as its trigger does once Airflow has told it
        code, said = stop("mine", *login)
        assert (code, said) == (
            0,
            f"{said.partition(':')[0]}: released, by its task, which was ended in Airflow\n",
        )
        manager.submit("mine", 1, labels=task("first").labels)
    code, said = stop("mine")
    assert (code, "Airflow may try its task again: stop --end-task" in said) == (0, True)


def test_the_command_refuses_the_id_of_another_airflow(airflow, monkeypatch):
    """Airflow answers "not found" for the tasks of another instance, as for a deleted task."""
    monkeypatch.delenv("GPU_MANAGER_INSTANCE", raising=False)

    def run(*words):
        options = ["--airflow-url", airflow.url, "--airflow-token", "token-1", "--json"]
        return CliRunner().invoke(main, ["--store", "memory://", "reconcile", *options, *words])

    def refused(*words):
        done = run(*words)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    assert run("--instance", "staging").exit_code == 0
    assert "id 'staging', not 'production'" in refused("--instance", "production")
    assert "id 'staging', not 'production'" in refused("--instance", "production", "--every", "5")
    assert "--instance: an instance is 1 to 40 letters" in refused("--instance", "a:b")
    monkeypatch.setenv("GPU_MANAGER_INSTANCE", "production")
    assert "id 'staging', not 'production'" in refused()
    assert run("--instance", "staging").exit_code == 0, "the option overrides the setting"
    monkeypatch.delenv("GPU_MANAGER_INSTANCE")
    for airflow.variable in ((404, {"detail": "no such Variable"}), (403, {"detail": "Forbidden"})):
        assert "does not give its instance id" in refused()
        assert run("--instance", "production").exit_code == 0, "the option works without a Variable"
    airflow.variable = 200, {"value": "a/b"}
    assert "Airflow Variable 'gpu_manager_instance': an instance is" in refused()


@pytest.mark.parametrize("answer", ["<html>welcome</html>", "[]", "{}", "1"])
def test_another_service_at_the_address_is_no_airflow(answer):
    class Welcome(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Welcome) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(AirflowUnavailableError, match="has no access_token; correct --airflow-url"):
            AirflowTaskStates(url, user="u", password="p")
        states = AirflowTaskStates(url, token="t")
        asks = (
            states.instance,
            lambda: states.unfinished(tasks("runs")),
            lambda: states.run_is_unfinished("d", "r"),
        )
        for ask in asks:
            with pytest.raises(AirflowUnavailableError, match="is no page of Airflow's API"):
                ask()
        server.shutdown()
