"""What people call leases, on every route that takes one, and in the console."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from resource_manager.rest.tokens import Role


def labels(run: int, index: int = -1) -> dict[str, str]:
    return {"dag_id": "my_dag", "run_id": f"run{run}", "task_id": "train", "map_index": str(index)}


def submit(client: FlaskClient, run: int, index: int = -1, gpus: int = 2, **more: Any) -> dict[str, Any]:
    body = {"task_id": f"here:my_dag/run{run}/train/{index}", "gpus": gpus, "labels": labels(run, index)}
    answer = client.post("/api/submit", json=body | more)
    assert answer.status_code in (200, 202), answer.text
    found: dict[str, Any] = answer.get_json()
    return found


def refused(client: FlaskClient, path: str, name: str) -> tuple[int, str]:
    answer = client.post(path, json={"task_id": name})
    return answer.status_code, answer.get_json()["detail"]


@pytest.mark.parametrize("by", ["short_id", "name", "task_id"])
def test_a_lease_is_named_by_each_of_its_names(open_client: FlaskClient, by: str) -> None:
    lease = submit(open_client, 1, 3)
    waits = submit(open_client, 2, 4, gpus=8, server=0)
    assert (lease["name"], waits["name"]) == ("my_dag.train[3]", "my_dag.train[4]")
    for entry in (lease, waits):
        found = open_client.get("/api/task", query_string={"task_id": entry[by]}).get_json()
        assert (found["task_id"], found["state"]) == (entry["task_id"], entry["state"])
    told = open_client.get("/api/task/explain", query_string={"name": waits[by]}).get_json()
    assert told["task_id"] == waits["task_id"]
    renewed = open_client.post("/api/renew", json={"task_id": lease[by]}).get_json()
    assert renewed["task_id"] == lease["task_id"]
    body = {"task_id": lease[by], "preemptor": waits[by], "dry_run": True}
    assert open_client.post("/api/preempt", json=body).get_json()["preempted_by"] == waits["task_id"]
    cancelled = open_client.post("/api/cancel", json={"task_id": waits[by]}).get_json()
    assert cancelled == {"success": True, "task_id": waits["task_id"]}
    released = open_client.post("/api/release", json={"task_id": lease[by]}).get_json()
    assert released["task_id"] == lease["task_id"]


def test_where_several_match_they_are_listed_and_none_is_touched(open_client: FlaskClient) -> None:
    ids = [submit(open_client, run)["short_id"] for run in range(3)]
    listed = ", ".join(f"my_dag.train {each}" for each in ids)
    detail = f"'my_dag.train' names 3: {listed}; say which by its short id"
    for path in ("/api/renew", "/api/release", "/api/preempt"):
        assert refused(open_client, path, "my_dag.train") == (409, detail)
    page = open_client.get("/lease?id=my_dag.train")
    assert (page.status_code, ids[2] in page.text) == (409, True)
    assert len(open_client.get("/api/leases").get_json()["items"]) == 3


def test_a_name_is_the_callers_own_before_it_is_anothers(as_role: Callable[..., FlaskClient]) -> None:
    ada, mallory, olga = as_role(Role.USER, "ada"), as_role(Role.USER, "mallory"), as_role(Role.OPERATOR)
    lease = submit(ada, 1)
    for name in (lease["short_id"], lease["name"]):
        mallory.post("/api/submit", json={"task_id": name, "gpus": 2})
        for path in ("/api/renew", "/api/release"):
            assert refused(olga, path, name)[0] == 409
        assert olga.get("/api/task", query_string={"task_id": name}).status_code == 409
        found = ada.get("/api/task", query_string={"task_id": name}).get_json()
        assert found["task_id"] == lease["task_id"]
        assert ada.post("/api/renew", json={"task_id": name}).get_json()["task_id"] == lease["task_id"]
        assert mallory.post("/api/release", json={"task_id": name}).get_json()["task_id"] == name
    called = labels(1) | {"dag_id": "my", "task_id": "own.id"}
    mallory.post("/api/submit", json={"task_id": "m", "gpus": 2, "labels": called})
    own = ada.post("/api/submit", json={"task_id": "my.own.id", "gpus": 2}).get_json()
    assert "my.own.id" in ada.get("/lease?id=my.own.id").text
    assert ada.post("/api/release", json={"task_id": own["task_id"]}).get_json()["task_id"] == "my.own.id"


def test_a_program_that_says_exact_never_ends_what_is_only_called_so(open_client: FlaskClient) -> None:
    """A released lease's id may be another one's name."""
    lease = submit(open_client, 1)
    for name in (lease["short_id"], lease["name"]):
        body = {"task_id": name, "exact": True}
        for path in ("/api/release", "/api/renew", "/api/cancel"):
            assert open_client.post(path, json=body).status_code == 404
        token = {"task_id": name, "fencing_token": lease["fencing_token"]}
        assert open_client.post("/api/release", json=token).status_code == 404
    assert len(open_client.get("/api/leases").get_json()["items"]) == 1


def test_a_program_that_says_exact_is_told_of_no_other_lease_than_it_means(open_client: FlaskClient) -> None:
    lease, waits = submit(open_client, 1), submit(open_client, 2, gpus=8, server=0)

    def status(entry: dict[str, Any], **query: Any) -> int:
        asked = {"task_id": entry["task_id"], "exact": True, **query}
        return open_client.get("/api/task", query_string=asked).status_code

    token = lease["fencing_token"]
    assert [status(lease, fencing_token=each) for each in (token, token + 1)] == [200, 404]
    assert [status(waits, fencing_token=each) for each in (token, token + 1)] == [404, 404]
    assert [status(lease, pending=each) for each in (False, True)] == [200, 404]
    assert [status(waits, pending=each) for each in (False, True)] == [404, 200]


def test_the_console_names_leases_and_finds_them_by_each_name(open_client: FlaskClient) -> None:
    lease, waits = submit(open_client, 1, 3), submit(open_client, 2, 4, gpus=8, server=0)
    lease_id = lease["task_id"]
    for path, entry in (("/leases", lease), ("/queue", waits)):
        for text in (entry["short_id"], "DAG.train[", entry["task_id"]):
            shown = open_client.get(path, query_string={"q": text}).text
            assert entry["name"] in shown
            assert entry["short_id"] in shown
    for name in (lease["short_id"], lease["name"], lease_id):
        shown = open_client.get("/lease", query_string={"id": name}).text
        assert f"{lease['name']} {lease['short_id']}" in shown
        assert lease_id in shown, "its own page has its id"
    open_client.post("/api/release", json={"task_id": lease["short_id"]})
    ended = open_client.get("/lease", query_string={"id": lease["short_id"]})
    assert (ended.status_code, "ENDED" in ended.text) == (200, True)


def test_what_ends_is_named_in_the_access_log(
    open_client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    lease = submit(open_client, 1, 3)
    with caplog.at_level(logging.INFO):
        open_client.post("/api/release", json={"task_id": lease["short_id"]})
    [line] = [text for text in caplog.messages if text.startswith("POST /api/release")]
    assert f"released my_dag.train[3] {lease['short_id']}" in line
    assert "here:my_dag" not in line
