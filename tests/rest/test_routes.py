"""Queue, paging, idempotency, metrics and problem documents."""

from __future__ import annotations

import ast
import inspect
import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from resource_manager import GPUResourceManager, Settings
from resource_manager.cli.tables import leases_table
from resource_manager.core.names import short_id
from resource_manager.errors import (
    CorruptStateError,
    LockError,
    LockTimeoutError,
    ResourceManagerError,
    StateLostError,
    StateUnconfirmedError,
)
from resource_manager.manager.refusal_wording import lock_busy
from resource_manager.rest import api
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.observability.metrics import Metrics
from resource_manager.rest.state_follower import StateFollower
from resource_manager.rest.tokens import Role
from tests.redis_server import RedisServer

BODY = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}


class Failing(GPUResourceManager):
    """Manager whose allocations and submissions end with that error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Settings(store="memory://"))
        self.error = error

    def submit(self, *given: Any, **more: Any) -> NoReturn:
        raise self.error

    try_allocate = submit


@contextmanager
def served_from(store: str | GPUResourceManager, kept: Persistence) -> Iterator[FlaskClient]:
    """Yield a client of a service without tokens of that manager, or of one of the store with that URL."""
    made = store if isinstance(store, GPUResourceManager) else GPUResourceManager.from_url(store)
    with made as manager:
        service = standalone(manager, kept, open_to="loopback")
        yield create_app(service).test_client()
        service.watch.close()


def fill(client: FlaskClient, count: int = 4, gpus: int = 8) -> None:
    requests = [{"task_id": f"t{i}", "required_gpus": gpus, "required_cpus": 1} for i in range(count)]
    assert client.post("/api/allocate/batch", json={"requests": requests}).status_code == 200


def test_a_batch_has_an_answer_for_each_request(open_client: FlaskClient) -> None:
    requests = [{**BODY, "task_id": f"t{i}", "required_gpus": 8} for i in range(5)]
    answer = open_client.post("/api/allocate/batch", json={"requests": requests}).get_json()
    assert [result and result["server_id"] for result in answer["results"]] == [0, 1, 2, 3, None]
    assert answer["refusals"] == [
        *[None] * 4,
        {"kind": "no_capacity", "detail": "no server with 8 GPUs: none is free anywhere"},
    ]
    assert metrics(open_client)["gpu_manager_refusals_total{kind=no_capacity}"] == 1
    assert open_client.post("/api/allocate/batch", json={"requests": []}).status_code == 400
    twice = {"requests": [BODY, BODY]}
    assert open_client.post("/api/allocate/batch", json=twice).status_code == 400


def test_lists_come_in_pages(open_client: FlaskClient) -> None:
    fill(open_client, 16, 2)
    seen: list[str] = []
    after: int | None = 0
    while after is not None:
        page = open_client.get(f"/api/leases?limit=5&after={after}").json
        assert page is not None
        seen += [item["task_id"] for item in page["items"]]
        after = page["next"]
    assert seen == [f"t{i}" for i in range(16)]
    history: list[int] = []
    after = 0
    while after is not None:
        page = open_client.get(f"/api/history?limit=7&after={after}").json
        assert page is not None
        history += [item["version"] for item in page["items"]]
        after = page["next"]
    assert history == list(range(1, 17))
    status = open_client.get("/api/status?limit=3").json
    assert status is not None
    assert (len(status["servers"]), status["next"]) == (3, 3)
    assert len(open_client.get("/api/status").json["servers"]) == 4  # type: ignore[index]
    for query in ("limit=0", "limit=x", "after=-1", "nonsense=1", "limit=1&limit=2"):
        assert open_client.get(f"/api/leases?{query}").status_code == 400


def test_a_change_sent_twice_with_one_key_is_made_once(open_client: FlaskClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = open_client.post("/api/allocate", json=BODY, headers=headers)
    again = open_client.post("/api/allocate", json=BODY, headers=headers)
    assert again.json == first.json
    assert again.headers["Idempotent-Replay"] == "true"
    open_client.post("/api/release", json={"task_id": "t"})
    over = open_client.post("/api/allocate", json=BODY, headers=headers)
    assert (over.status_code, over.json["type"]) == (409, "urn:gpu-manager:already-done")  # type: ignore[index]
    assert "has ended: use a new key" in over.json["detail"]  # type: ignore[index]
    assert open_client.get("/api/leases").json["items"] == []  # type: ignore[index]
    other = open_client.post("/api/allocate", json={**BODY, "required_gpus": 4}, headers=headers)
    assert other.status_code == 422
    for key in ("", "x" * 256):
        assert (
            open_client.post("/api/allocate", json=BODY, headers={"Idempotency-Key": key}).status_code == 400
        )


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        ("get", "/api/agent/jobs", {"409"}),
        ("post", "/api/reports", {"400", "413", "415"}),
        ("post", "/api/login", {"400", "403", "404"}),
    ],
)
def test_failures_of_an_operation_s_own_are_in_the_document(
    open_client: FlaskClient, method: str, path: str, statuses: set[str]
) -> None:
    paths = open_client.get("/openapi.json").get_json()["paths"]
    assert statuses <= paths[path][method]["responses"].keys()


def test_an_idempotency_key_is_declared_by_exactly_those_operations_that_use_it(
    open_client: FlaskClient,
) -> None:
    paths = open_client.get("/openapi.json").get_json()["paths"]
    declared = {
        operation["operationId"]
        for operations in paths.values()
        for operation in operations.values()
        if "Idempotency-Key" in {each["name"] for each in operation["parameters"]}
    }
    used = set()
    for route in api.routes.all:
        names = ast.walk(ast.parse(inspect.getsource(route.handler)))
        if "once" in {node.id for node in names if isinstance(node, ast.Name)}:
            used.add(route.handler.__name__)
    assert declared == used
    assert "announce" not in declared


def test_what_the_service_does_not_read_is_refused_and_not_ignored(open_client: FlaskClient) -> None:
    for headers, status, said in (
        ({"If-Match": '"3"'}, 400, "If-Match is not read: give the revision or fencing_token in the body"),
        ({"Content-Encoding": "gzip"}, 415, "send the body as it is, without Content-Encoding: gzip"),
    ):
        answer = open_client.post("/api/allocate", json=BODY, headers=headers)
        assert (answer.status_code, answer.get_json()["detail"]) == (status, said)
    assert open_client.get("/api/leases").get_json()["items"] == []


@pytest.mark.parametrize("body", ["null", "[]", '"x"'])
def test_a_body_that_is_no_object_is_told_so_in_words_of_json(open_client: FlaskClient, body: str) -> None:
    answer = open_client.post("/api/allocate", data=body, content_type="application/json")
    assert answer.get_json()["detail"] == "the body must be a JSON object"
    items = open_client.post("/api/allocate/batch", json={"requests": [7]})
    assert items.get_json()["detail"] == "requests.0 must be a JSON object"


def test_a_release_sent_twice_does_not_end_the_next_lease(open_client: FlaskClient) -> None:
    open_client.post("/api/allocate", json=BODY)
    release = {"json": {"task_id": "t"}, "headers": {"Idempotency-Key": "r"}}
    assert open_client.post("/api/release", **release).status_code == 200
    open_client.post("/api/allocate", json=BODY)
    again = open_client.post("/api/release", **release)
    assert (again.status_code, again.headers["Idempotent-Replay"]) == (200, "true")
    assert len(open_client.get("/api/leases").json["items"]) == 1  # type: ignore[index]


def test_a_wrong_section_of_the_cluster_is_one_line_that_says_what_is_right(
    open_client: FlaskClient,
) -> None:
    for sections, said in (
        ({"notices": [{"on": ["idle"], "to": "x"}]}, "sections.notices.0.to must be an address such as"),
        (
            {"teams": {"a": {"max_runtime": 30}}},
            "teams.a.max_runtime: 30 s must be above preempt_grace (60 s)",
        ),
        ({"servers": [{"name": "a", "cpus": 8, "mps": "x"}]}, "sections.servers.0.mps must be true, or the"),
        ({"servers": [{"name": "a", "cpus": 8, "gpus": -1}]}, "sections.servers.0.gpus must be"),
    ):
        answer = open_client.put("/api/cluster", json={"sections": sections})
        assert answer.status_code == 400
        assert answer.get_json()["detail"].startswith(said)


def test_what_was_refused_is_tried_again_with_its_key(open_client: FlaskClient) -> None:
    """Nothing was changed, so nothing can be made twice."""
    headers = {"Idempotency-Key": "k"}
    assert open_client.post("/api/release", json={"task_id": "t"}, headers=headers).status_code == 404
    open_client.post("/api/allocate", json=BODY)
    assert open_client.post("/api/release", json={"task_id": "t"}, headers=headers).status_code == 200


def test_a_request_that_did_not_fit_can_be_retried_with_its_key(open_client: FlaskClient) -> None:
    fill(open_client)
    headers = {"Idempotency-Key": "k1"}
    assert open_client.post("/api/allocate", json=BODY, headers=headers).status_code == 503
    open_client.post("/api/release", json={"task_id": "t0"})
    assert open_client.post("/api/allocate", json=BODY, headers=headers).status_code == 200


def test_keys_of_different_callers_are_independent(as_role: Any) -> None:
    headers = {"Idempotency-Key": "k1"}
    ada, bob = as_role(Role.USER, "ada"), as_role(Role.USER, "bob")
    assert ada.post("/api/allocate", json=BODY, headers=headers).status_code == 200
    assert bob.post("/api/allocate", json={**BODY, "task_id": "u"}, headers=headers).status_code == 200


def test_estimated_starts_follow_from_stated_runtimes(open_client: FlaskClient) -> None:
    for i in range(4):
        payload = {
            "task_id": f"t{i}",
            "required_gpus": 8,
            "required_cpus": 1,
            "expected_runtime": 600 * (i + 1),
        }
        open_client.post("/api/allocate", json=payload)
    for i in range(2):
        open_client.post("/api/submit", json={**BODY, "task_id": f"w{i}", "required_gpus": 8})
    items = open_client.get("/api/queue").json["items"]  # type: ignore[index]
    now = open_client.get("/api/leases").json["items"][0]["granted_at"]  # type: ignore[index]
    assert [item["estimated_start"]["confidence"] for item in items] == ["few data", "few data"]
    assert [round(item["estimated_start"]["at"] - now, -1) for item in items] == [600, 1200]
    answer = open_client.get("/api/explain?required_gpus=8&required_cpus=1").json
    assert answer is not None
    assert answer["fits"] is False
    assert round(answer["estimated_start"]["at"] - now, -1) == 1800
    version = open_client.get("/api/status").json["version"]  # type: ignore[index]
    assert version == 6


def metrics(client: FlaskClient) -> dict[str, float]:
    text = client.get("/metrics").get_data(as_text=True)
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


def test_metrics_count_changes_and_requests(open_client: FlaskClient) -> None:
    fill(open_client)
    open_client.post("/api/submit", json=BODY)
    seen = metrics(open_client)
    assert seen["gpu_manager_queue_length"] == 1
    assert seen["gpu_manager_gpus_allocated{gpu_type=,server=gpu-server-0}"] == 8
    assert seen["gpu_manager_gpus_free{gpu_type=,server=gpu-server-0}"] == 0
    assert seen["gpu_manager_allocations_total{server=gpu-server-3}"] == 1
    open_client.post("/api/release", json={"task_id": "t2"})
    seen = metrics(open_client)
    assert seen["gpu_manager_queue_length"] == 0
    assert seen["gpu_manager_wait_seconds_count"] == 5
    assert seen["gpu_manager_releases_total"] == 1
    assert seen["gpu_manager_gpus_free{gpu_type=,server=gpu-server-2}"] == 6
    assert seen["gpu_manager_http_request_seconds_count{method=POST,route=/api/submit,status=200}"] == 1
    assert seen["gpu_manager_commit_seconds_count"] >= 3
    open_client.get("/no/such/page")
    assert "gpu_manager_http_request_seconds_count{method=other,route=unknown,status=404}" in metrics(
        open_client
    )


def test_metrics_count_no_capacity_of_a_closed_server_as_free(open_client: FlaskClient) -> None:
    open_client.post("/api/allocate", json={"task_id": "a", "required_gpus": 2, "required_cpus": 8})
    open_client.post("/api/servers/0/drain", json={"failed": True})
    seen = metrics(open_client)
    for server, gpus, cpus in ((0, (0, 2, 6), (0, 8, 56)), (1, (8, 0, 0), (64, 0, 0))):
        where = f"server=gpu-server-{server}"
        kinds = ("free", "allocated", "closed")
        assert tuple(seen[f"gpu_manager_gpus_{kind}{{gpu_type=,{where}}}"] for kind in kinds) == gpus
        assert tuple(seen[f"gpu_manager_cpus_{kind}{{{where}}}"] for kind in kinds) == cpus


def test_the_console_counts_no_capacity_of_a_closed_server_as_free(open_client: FlaskClient) -> None:
    open_client.post("/api/allocate", json={"task_id": "a/b/job", "required_gpus": 2, "required_cpus": 8})
    open_client.post("/api/servers/0/drain", json={"reason": "fan"})
    page = open_client.get("/").get_data(as_text=True)
    assert "<dd>24 free <small>2 used, 6 closed of 32</small>" in page
    assert "<dt>CPUs</dt><dd>192 free <small>8 used, 56 closed of 256</small>" in page
    first, second = page.split('data-server="')[1:3]
    assert "0 free, 2 used, 6 closed of 8" in first
    assert "0 free, 8 used, 56 closed of 64" in first
    cells = [part.count(f"<span>{text}</span>") for part in (first, second) for text in ("closed", "free")]
    assert (cells, first.count("<span>a/b/job</span>")) == ([6, 0, 0, 8], 1)
    servers = open_client.get("/api/status").json["servers"]  # type: ignore[index]
    assert [server["available_gpus"] for server in servers] == [0, 8, 8, 8]
    assert [server["closed_gpus"] for server in servers] == [6, 0, 0, 0]


def test_a_lease_has_the_same_colour_on_every_page(open_client: FlaskClient) -> None:
    for name, gpus in (("a", 2), ("b", 4), ("c", 8)):
        open_client.post("/api/allocate", json={"task_id": name, "required_gpus": gpus, "required_cpus": 1})
    open_client.post(
        "/api/allocate", json={"task_id": "p", "required_gpus": 1, "required_cpus": 1, "gpu_milli": 500}
    )

    def seen(path: str) -> list[str]:
        return re.findall(r'class="(?:cell|swatch) (held h\d+ v\d+(?: pale)?)', open_client.get(path).text)

    on_servers = seen("/")[:4]
    assert len(set(on_servers)) == 4
    assert set(seen("/leases")) == set(on_servers)
    assert set(seen("/fragments/servers?ids=0&ids=1")) == set(on_servers)
    open_client.post("/api/release", json={"task_id": "a"})
    assert set(seen("/leases")) == set(on_servers) - {on_servers[0]}


def test_changes_by_other_processes_are_counted(
    open_client: FlaskClient, manager: GPUResourceManager
) -> None:
    manager.allocate_resources("elsewhere", 2, 1)
    assert metrics(open_client)["gpu_manager_allocations_total{server=gpu-server-0}"] == 1


@pytest.mark.parametrize("path", ["/nope", "/api/leases/x", "/api/servers/x/drain"])
def test_unknown_paths_are_problems(open_client: FlaskClient, path: str) -> None:
    response = open_client.get(path)
    assert response.status_code in (404, 405)
    problem = response.json
    assert problem is not None
    assert {"type", "title", "status", "detail", "error"} <= set(problem)
    assert response.content_type == "application/problem+json"


@pytest.mark.parametrize(("path", "status"), [("/nope", 404), ("/act/hold", 405)])
def test_a_browser_at_an_unknown_path_gets_a_page_that_leads_back(
    open_client: FlaskClient, path: str, status: int
) -> None:
    of_chromium = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
    response = open_client.get(path, headers={"Accept": of_chromium})
    assert (response.status_code, response.mimetype) == (status, "text/html")
    text = response.get_data(as_text=True)
    assert '<a href="/">Overview</a>' in text
    assert '<nav aria-label="Pages">' in text, "who is known there finds the menu"
    assert "aria-current" not in text, "which marks no page of it"


class CrashingManager(GPUResourceManager):
    def queue(self, *_: object, **more: object) -> Any:
        raise RuntimeError("s3cret")


@pytest.mark.parametrize("manager_class", [CrashingManager])
def test_a_crash_is_a_page_for_a_browser_and_a_problem_for_a_program(open_client: FlaskClient) -> None:
    for path, kind in (("/queue", "text/html"), ("/api/queue", "application/problem+json")):
        answer = open_client.get(path)
        assert (answer.status_code, answer.mimetype) == (500, kind)
        assert "internal error: see the log of the service" in answer.get_data(as_text=True)
        assert "s3cret" not in answer.get_data(as_text=True)


@pytest.mark.parametrize("field", ["prefer_server_id", "server"])
def test_an_unknown_server_is_reported_under_the_field_that_named_it(
    open_client: FlaskClient, field: str
) -> None:
    answer = open_client.post("/api/allocate", json={**BODY, field: 77})
    assert (answer.status_code, answer.get_json()["errors"][0]["field"]) == (400, field)


def test_true_is_no_number_in_a_body(open_client: FlaskClient) -> None:
    for path, field in (("/api/servers/0/drain", "gpu"), ("/api/servers/0/searched", "age_s")):
        answer = open_client.post(path, json={"jobs": [], field: True} if field == "age_s" else {field: True})
        assert (answer.status_code, answer.get_json()["errors"][0]["field"]) == (400, field)


def test_a_full_cluster_is_a_refusal_with_its_kind_and_reason(open_client: FlaskClient) -> None:
    for task_id in ("one", "two", "three", "four"):
        assert (
            open_client.post(
                "/api/allocate", json={**BODY, "task_id": task_id, "required_gpus": 8}
            ).status_code
            == 200
        )
    full = open_client.post("/api/allocate", json={**BODY, "task_id": "five"})
    problem = full.get_json()
    assert (full.status_code, problem["type"]) == (503, "urn:gpu-manager:no-capacity")
    assert (problem["kind"], problem["error"]) == ("no_capacity", "Resource allocation failed")
    assert problem["detail"].startswith("no server with ")
    assert full.headers["Retry-After"] == "5"
    assert metrics(open_client)["gpu_manager_refusals_total{kind=no_capacity}"] == 1
    never = open_client.post("/api/allocate", json={**BODY, "task_id": "six", "gpu_types": ["H900"]})
    assert (never.status_code, never.get_json()["kind"]) == (503, "never_fits")
    assert "Retry-After" not in never.headers
    queued = open_client.post("/api/submit", json={**BODY, "task_id": "six", "gpu_types": ["H900"]})
    assert (queued.status_code, queued.get_json()["kind"]) == (400, "never_fits")
    open_client.post("/api/submit", json={**BODY, "task_id": "five"})
    (entry,) = open_client.get("/api/queue").get_json()["items"]
    assert (entry["kind"], entry["reason"]) == ("no_capacity", problem["detail"])
    page = open_client.get("/queue").get_data(as_text=True)
    assert problem["detail"] in page
    assert f"unknown <small>the end of one {short_id(1)} and 3 more is unknown" in page


@pytest.mark.parametrize(
    ("error", "kind", "retry_after"),
    [
        (StateUnconfirmedError("Redis was restarted", remaining_s=47.2), "recovering", "48"),
        (LockTimeoutError(60.0), "lock_busy", "5"),
    ],
)
@pytest.mark.parametrize("path", ["/api/allocate", "/api/submit"])
def test_a_store_failure_is_not_reported_as_missing_capacity(
    kept: Persistence, path: str, error: ResourceManagerError, kind: str, retry_after: str
) -> None:
    with served_from(Failing(error), kept) as client:
        answer = client.post(path, json=BODY)
    problem = answer.get_json()
    assert (answer.status_code, problem["kind"]) == (503, kind)
    assert problem["type"] == f"urn:gpu-manager:{kind.replace('_', '-')}"
    assert problem["error"] == "Resource allocation failed"
    assert answer.headers["Retry-After"] == retry_after
    if kind == "lock_busy":
        assert problem["detail"] == lock_busy(60.0).detail


def test_an_unreachable_store_is_503(own_redis: RedisServer, kept: Persistence) -> None:
    with served_from(own_redis.limited_url(), kept) as client:
        own_redis.stop(signal.SIGKILL)
        for path in ("/healthz", "/api/status", "/metrics", "/api/trends"):
            response = client.get(path)
            assert response.status_code == 503, path
            assert response.headers["Retry-After"]
        problem = client.post("/api/allocate", json=BODY).get_json()
        page = client.get("/")
    assert problem["error"] == "Resource allocation failed"
    assert problem["type"] == "about:blank"
    assert page.status_code == 503
    assert "cannot be reached" in page.get_data(as_text=True)


@pytest.mark.parametrize(
    "error",
    [
        CorruptStateError("the state cannot be read"),
        StateLostError("the state went back in time"),
        StateUnconfirmedError("nothing is granted yet", remaining_s=5.0),
        LockTimeoutError(60.0),
        LockError("the state was not written: the lock had only 0.1 s left"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_the_caller_cannot_fix_is_503(kept: Persistence, error: ResourceManagerError) -> None:
    with served_from(Failing(error), kept) as client:
        response = client.post("/api/submit", json=BODY)
    assert response.status_code == 503
    assert response.get_json()["detail"] == str(error)
    assert int(response.headers["Retry-After"]) > 0


def test_a_busy_lock_is_not_reported_as_a_missing_lease(
    kept: Persistence,
) -> None:
    manager = GPUResourceManager(Settings(store="memory://", lock_timeout_s=0.05))
    with served_from(manager, kept) as client:
        assert client.post("/api/allocate", json=BODY).status_code == 200
        lock = manager.store.lock()
        assert lock.acquire(1)
        refused = client.post("/api/release", json={"task_id": "t"})
        assert refused.status_code == 503
        assert "the lock was busy for " in refused.get_json()["detail"]
        lock.release()
        assert client.post("/api/release", json={"task_id": "t"}).status_code == 200


def test_a_reset_removes_its_leases_from_the_metrics(manager: GPUResourceManager) -> None:
    watch = StateFollower(manager.store)
    metrics = Metrics(watch)
    manager.allocate_resources("dropped", 2, 1)
    metrics.text()
    manager.reset_resources()
    manager.allocate_resources("another", 2, 1)
    assert b'gpu_manager_leases{state="running"} 1.0' in metrics.text()
    known = watch.read(lambda cluster, now: [life.lease.lease_id for life in watch.lives.lives.values()])
    assert known == ["another"]
    watch.close()


def test_events_name_the_changed_servers(open_client: FlaskClient) -> None:
    response = open_client.get("/events?after=0", buffered=False)
    lines = response.iter_encoded()
    assert next(lines) == b"retry: 2000\n\n"
    open_client.post("/api/allocate", json={**BODY, "prefer_server_id": 2})
    event = next(lines).decode()
    while event.startswith(":"):
        event = next(lines).decode()
    data = json.loads(event.partition("data: ")[2])
    assert data["servers"] is None or 2 in data["servers"]
    open_client.post("/api/release", json={"task_id": "t"})
    data = json.loads(next(lines).decode().partition("data: ")[2])
    assert data == {"version": 2, "servers": [2]}
    assert metrics(open_client)["gpu_manager_http_streams"] == 1
    response.close()
    assert metrics(open_client)["gpu_manager_http_streams"] == 0


def test_a_time_to_live_is_not_shown_as_an_end(open_client: FlaskClient) -> None:
    open_client.post("/api/allocate", json=BODY)
    page = open_client.get("/leases").get_data(as_text=True)
    assert "Expires unless renewed</th>" in page
    assert ">Ends<" not in page
    headers = [column.name for column in leases_table([], 0.0).columns]
    assert "renew within" in headers
    assert "ends in" not in headers


def test_the_history_is_found_by_who_asked_and_what(as_role: Any) -> None:
    ada, bob = as_role(Role.USER, "ada"), as_role(Role.USER, "bob")
    for client, name in ((ada, "a"), (bob, "b")):
        client.post("/api/submit", json={"task_id": name, "gpus": 2, "cpus": 1})
        client.post("/api/release", json={"task_id": name})

    def found(query: str) -> list[tuple[str, str]]:
        items = ada.get(f"/api/history?{query}").get_json()["items"]
        return [(item["change"], item["by"]) for item in items]

    assert found("by=ada") == [("granted", "ada"), ("released", "ada")]
    assert found("by=ada&what=release") == [("released", "ada")]
    assert found("what=release") == [("released", "ada"), ("released", "bob")]
    page = ada.get("/api/history?by=bob&limit=2").get_json()
    assert (page["items"], page["next"]) == ([], 2), "the limit counts what is looked at"
    wrong = ada.get("/api/history?what=borrow")
    assert (wrong.status_code, "what" in wrong.get_json()["detail"]) == (400, True)


@pytest.mark.parametrize("body", [{"by": "bob"}, {"preemptor": "bob"}])
def test_no_body_says_who_asks(as_role: Any, body: dict[str, str]) -> None:
    ada = as_role(Role.USER, "ada")
    ada.post("/api/submit", json={"task_id": "t", "gpus": 2, "cpus": 1})
    assert ada.post("/api/release", json={"task_id": "t", **body}).status_code == 400


def test_a_token_cannot_have_the_name_of_a_task_or_of_another_machines_user(as_role: Any) -> None:
    eve = as_role(Role.USER, "unix:root@gpu-a")
    eve.post("/api/submit", json={"task_id": "t", "gpus": 2, "cpus": 1})
    [change] = eve.get("/api/history").get_json()["items"]
    assert change["by"] == "user:unix:root@gpu-a"
