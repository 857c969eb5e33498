"""Console inside a real Airflow: its frame, its users, its login."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from demo.stack import Stack, wait_until
from tests.e2e import browser as b
from tests.e2e.plugin import assert_loaded_once

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

USERS = "olga:op,ursula:user,vera:viewer"
PLUGIN_PAGES = {"gpus": "Servers", "gpu-queue": "Queue"}
"""Heading of each page of the plugin, by its route."""

DAG = """
from datetime import timedelta

from airflow.sdk import DAG
from resource_manager.airflow import GPUTrainingOperator

with DAG("console_job", schedule=None):
    GPUTrainingOperator(task_id="job", gpus=2, cpus=2, command="echo trains; sleep 900")

with DAG("tries_again", schedule=None, default_args={"owner": "dagmar"}):
    GPUTrainingOperator(
        task_id="job", gpus=1, retries=1, retry_delay=timedelta(minutes=5), command="sleep 900"
    )
"""

BODY = {"required_gpus": 4, "required_cpus": 16}


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home, dags = tmp_path_factory.mktemp("airflow"), tmp_path_factory.mktemp("dags")
    (dags / "console_job.py").write_text(DAG)
    (home / "servers.toml").write_text(b.INVENTORY.format(count=4))
    settings = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": USERS,
        "GPU_MANAGER_INVENTORY": str(home / "servers.toml"),
    }
    with Stack(home, dags=dags, settings=settings, answer_timeout_s=120.0) as stack:
        yield stack


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with b.chromium() as browser:
        yield browser


def password(airflow: Stack, name: str) -> str:
    text = (Path(airflow.home) / "simple_auth_manager_passwords.json.generated").read_text()
    return str(json.loads(text)[name])


def client(airflow: Stack, name: str | None) -> httpx.Client:
    headers = {}
    if name is not None:
        login = {"username": name, "password": password(airflow, name)}
        answer = httpx.post(f"{airflow.url}/auth/token", json=login, timeout=60)
        headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
    return httpx.Client(base_url=f"{airflow.url}/gpu", headers=headers, timeout=60)


def logged_in(chromium: Any, airflow: Stack, name: str, **context: Any) -> Any:
    """Return a page of Airflow after the log-in of that user."""
    page = chromium.new_context(**{"viewport": {"width": 1400, "height": 850}, **context}).new_page()
    page.goto(f"{airflow.url}/auth/login", timeout=60_000)
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password(airflow, name))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/auth/login" not in url, timeout=60_000)
    return page


def console(chromium: Any, airflow: Stack, name: str) -> tuple[Any, Any]:
    """Log in and return Airflow's page with the console in its frame."""
    page = logged_in(chromium, airflow, name)
    page.goto(f"{airflow.url}/plugin/gpus", timeout=60_000)
    frame = page.frame_locator("iframe[title=GPUs]")
    b.expect(frame.get_by_role("heading", name="Servers")).to_be_visible(timeout=60_000)
    return page, frame


def test_the_plugins_of_package_and_folder_are_loaded_once(airflow: Stack) -> None:
    assert_loaded_once(airflow.api)


def test_users_without_login_are_refused(airflow: Stack) -> None:
    with client(airflow, None) as stranger:
        for path in (
            "/",
            "/api/status",
            "/livez",
            "/readyz",
            "/healthz",
            "/metrics",
            "/openapi.json",
            "/events",
            "/static/console.js",
        ):
            assert stranger.get(path).status_code == 401, path
        assert stranger.post("/api/allocate", json={**BODY, "task_id": "t"}).status_code == 401
        sent = stranger.get("/", headers={"Accept": "text/html"})
        assert sent.status_code == 303
        assert "/auth/login" in sent.headers["Location"]
        # pragma: allowlist nextline secret
        forged = {"Authorization": "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJvbGdhIn0."}
        assert stranger.get("/api/status", headers=forged).status_code in (401, 403)


@pytest.mark.parametrize(
    ("name", "allocates", "drains"), [("vera", 403, 403), ("ursula", 200, 403), ("olga", 200, 200)]
)
def test_airflow_roles_decide_the_rights(airflow: Stack, name: str, allocates: int, drains: int) -> None:
    with client(airflow, name) as caller:
        assert caller.get("/api/status").status_code == 200
        payload = {**BODY, "task_id": f"role-{name}"}
        assert caller.post("/api/allocate", json=payload).status_code == allocates
        assert caller.post("/api/servers/3/drain", json={}).status_code == drains
        assert caller.post("/api/release", json={"task_id": f"role-{name}"}).status_code == allocates
    with client(airflow, "olga") as olga:
        olga.post("/api/servers/3/resume").raise_for_status()


def test_the_console_is_in_airflows_navigation(airflow: Stack, chromium: Any) -> None:
    page, frame = console(chromium, airflow, "olga")
    b.expect(frame.get_by_text("Live", exact=True)).to_be_visible()
    labels = {"dag_id": "train_digits", "run_id": "manual__1", "task_id": "train_small"}
    with client(airflow, "ursula") as ursula:
        body = {**BODY, "task_id": "seen", "labels": labels}
        lease = ursula.post("/api/allocate", json=body).raise_for_status().json()
    seen = f"train_digits.train_small {lease['short_id']}"
    b.expect(frame.locator(".cell[data-task=seen]").first).to_be_visible()
    b.picture(page, "airflow-page")
    row = frame.locator("#server-1")
    row.get_by_text("Drain…").click()
    row.get_by_role("button", name="Drain gpu-server-1").click()
    b.expect(frame.get_by_text("gpu-server-1 takes no new leases.")).to_be_visible()
    frame.locator("#server-1").get_by_text("Resume…").click()
    frame.locator("#server-1").get_by_role("button", name="Resume gpu-server-1").click()
    b.expect(frame.get_by_text("gpu-server-1 takes leases again.")).to_be_visible()
    frame.get_by_role("link", name="Leases", exact=True).click()
    frame.get_by_text("Release…").click()
    frame.get_by_role("button", name=f"Release {seen}").click()
    b.expect(frame.get_by_text(f"{seen} is released.")).to_be_visible()
    page.context.close()


def test_a_lease_links_to_its_task(airflow: Stack, chromium: Any) -> None:
    labels = {"dag_id": "train_digits", "run_id": "manual__1", "task_id": "train_small"}
    with client(airflow, "ursula") as ursula:
        ursula.post("/api/allocate", json={**BODY, "task_id": "linked", "labels": labels}).raise_for_status()
    page, frame = console(chromium, airflow, "vera")
    frame.get_by_role("link", name="Leases", exact=True).click()
    frame.get_by_role("link", name="train_digits.train_small", exact=True).click()
    frame.get_by_role("link", name="Task and log in Airflow").click()
    page.wait_for_url("**/dags/train_digits/runs/manual__1/tasks/train_small", timeout=20_000)
    page.context.close()
    with client(airflow, "ursula") as ursula:
        ursula.post("/api/release", json={"task_id": "linked"}).raise_for_status()


def test_a_viewer_has_no_buttons(airflow: Stack, chromium: Any) -> None:
    page, frame = console(chromium, airflow, "vera")
    b.expect(frame.get_by_text("Live", exact=True)).to_be_visible()
    b.expect(frame.get_by_text("Drain…")).to_have_count(0)
    page.context.close()


def test_a_task_leads_to_its_lease_and_stop_job_ends_it(airflow: Stack, chromium: Any) -> None:
    run_id = airflow.api.trigger("console_job")
    with client(airflow, "vera") as vera:

        def leases() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = vera.get("/api/leases").json()["items"]
            return [lease for lease in found if lease["labels"].get("run_id") == run_id]

        job = f"/dags/console_job/dagRuns/{run_id}/taskInstances/job"

        wait_until(  # Airflow's page asks once, and the link is stored when the task is deferred
            lambda: airflow.api.call("GET", f"{job}/links")["extra_links"].get("GPU console"),
            120.0,
            "the task has no link to its lease",
        )
        wait_until(  # a job that a slow triggerer has not begun cannot be stopped
            lambda: [lease for lease in leases() if lease["job_places"]], 120.0, "the job does not begin"
        )
        page = logged_in(chromium, airflow, "olga")
        page.goto(f"{airflow.url}/dags/console_job/runs/{run_id}/tasks/job", timeout=60_000)
        in_log = page.get_by_role("link", name="/gpu/lease?id=")
        b.expect(in_log).to_have_attribute("href", re.compile(r"/gpu/lease\?id=.*job$"), timeout=60_000)
        b.picture(page, "airflow-task-log")
        page.goto(f"{airflow.url}/dags/console_job/runs/{run_id}/tasks/job/details", timeout=60_000)
        link = page.get_by_role("link", name="GPU console")
        b.expect(link).to_have_count(1, timeout=60_000)
        b.picture(page, "airflow-task")
        page.goto(link.get_attribute("href"), timeout=60_000)
        b.expect(page.get_by_text("RUNNING", exact=True)).to_be_visible()
        b.picture(page, "airflow-lease")
        page.goto(f"{airflow.url}/plugin/gpus", timeout=60_000)
        frame = page.frame_locator("iframe[title=GPUs]")
        frame.locator(".cell", has_text="job").click(timeout=60_000)
        frame.get_by_role("button", name="Stop job…").click()
        frame.get_by_role("button", name="Stop this run of").click()
        b.expect(frame.get_by_text("is released: its job was stopped.")).to_be_visible()
        b.picture(page, "airflow-stopped")
        assert leases() == []
    page.context.close()
    over = ("failed", "success")
    wait_until(lambda: airflow.api.run_state("console_job", run_id) in over, 120.0, "the task runs on")
    assert airflow.api.run_state("console_job", run_id) == "failed"


def test_who_triggered_a_run_owns_its_lease_and_ends_its_task_for_good(airflow: Stack, chromium: Any) -> None:
    api = f"{airflow.url}/api/v2/dags/tries_again"
    login = {"username": "ursula", "password": password(airflow, "ursula")}
    token = httpx.post(f"{airflow.url}/auth/token", json=login, timeout=60).json()["access_token"]
    as_ursula = {"Authorization": f"Bearer {token}"}
    airflow.api.call("PATCH", "/dags/tries_again", {"is_paused": False})
    answer = httpx.post(f"{api}/dagRuns", json={"logical_date": None}, headers=as_ursula, timeout=60)
    run_id = answer.raise_for_status().json()["dag_run_id"]
    with client(airflow, "ursula") as ursula:

        def leases() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = ursula.get("/api/leases").json()["items"]
            return [lease for lease in found if lease["labels"].get("run_id") == run_id]

        wait_until(leases, 120.0, "no lease")
        [lease] = leases()
        assert lease["owner"] == "ursula"
        page = logged_in(chromium, airflow, "ursula")
        page.goto(f"{airflow.url}/gpu/lease?id={quote(lease['task_id'], safe='')}", timeout=60_000)
        page.get_by_role("button", name="Stop job…").click()
        b.expect(page.get_by_text("Airflow tries it again in 5 min.")).to_be_visible()
        b.picture(page, "airflow-stop-or-end")
        page.get_by_role("button", name="End the task").click()
        b.expect(page.get_by_text("is released:")).to_be_visible(timeout=30_000)
        page.context.close()
        state = airflow.api.call("GET", f"/dags/tries_again/dagRuns/{run_id}/taskInstances/job")["state"]
        assert (state, leases()) == ("failed", [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_pages_of_the_plugin_fit_and_axe_finds_nothing_serious(
    airflow: Stack, chromium: Any, scheme: str, width: int
) -> None:
    source = b.axe_source()
    with client(airflow, "ursula") as ursula:
        for number in range(5):
            body = {
                **BODY,
                "task_id": f"d/r/task{number}",
                "required_gpus": 8,
                "expected_runtime": 3600,
            }
            ursula.post("/api/submit", json=body).raise_for_status()
    viewport = {"width": width, "height": 850}
    page = logged_in(chromium, airflow, "olga", viewport=viewport, color_scheme=scheme, bypass_csp=True)
    page.evaluate("scheme => localStorage.setItem('theme', scheme)", scheme)
    for route, heading in PLUGIN_PAGES.items():
        page.goto(f"{airflow.url}/plugin/{route}", timeout=60_000)
        frame = page.frame_locator("iframe")
        b.expect(frame.get_by_role("heading", name=heading)).to_be_visible(timeout=60_000)
        b.expect(frame.get_by_text("Live", exact=True)).to_be_visible()
        b.picture(page, f"airflow-{route}-{width}-{scheme}")
        [inner] = page.frames[1:]
        assert b.serious(inner, source) == []
        assert (
            inner.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        )
    page.context.close()
