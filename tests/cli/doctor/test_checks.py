"""Each fault that `doctor` knows is found in what was observed, and says the next step."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager import __version__
from resource_manager.cli.doctor import checks
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.rest.tokens import Token

HEALTHY = {
    "scheduler": "healthy",
    "triggerer": "healthy",
    "plugins": ["gpu_resource_manager"],
    "reconcile": False,
    "instance": "k7wd",
}


def server(**fields: Any) -> dict[str, Any]:
    healthy = {"silent_since": None, "drained": False, "drain_reason": "", "state": "IDLE"}
    return {"server_name": "gpu-a", "gpus_closed": [], **healthy, **fields}


def use(**fields: Any) -> dict[str, Any]:
    return {"age_s": 3.0, "error": "", "agent_version": __version__, **fields}


def faults(found: Any) -> list[str]:
    return [finding.text for finding in found if not finding.ok]


def test_a_healthy_stack_has_no_fault() -> None:
    summary = {"servers": [{"total_gpus": 8}], "total_servers": 1, "leases": 1}
    [cluster] = checks.of_cluster(summary, [])
    assert (cluster.ok, cluster.text) == (True, "1 server, 8 GPUs, 1 lease")
    assert checks.of_server(server(), use(), 100.0) == []
    assert checks.of_server(server(), use(age_s=None, agent_version=None), 100.0) == []
    assert checks.of_disk("/jobs", checks.LEAST_FREE_BYTES).ok
    assert faults(checks.of_airflow(HEALTHY)) == []
    assert faults(checks.of_airflow({**HEALTHY, "plugins": None})) == [], "this user may not see the plugins"


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        ("Connection refused.", "redis://x: Connection refused: start it, or correct GPU_MANAGER_STORE"),
        ("invalid password", "invalid password: correct user and password in GPU_MANAGER_STORE"),
        ("SQL stores need sqlalchemy: pip install 'the.whl[sql]'", "pip install 'the.whl[sql]'"),
    ],
)
def test_a_store_that_cannot_be_read_says_the_one_next_step(error: str, ends: str) -> None:
    assert checks.of_store_out_of_reach(error, "redis://x").text.endswith(ends)


@pytest.mark.parametrize(
    ("row", "report", "words"),
    [
        (
            {"silent_since": 5.0},
            {"age_s": None, "agent_version": None},
            ["silent for 95 s", "systemctl status gpu-manager-agent", "gpu-manager agent --server "],
        ),
        ({}, {"error": "no NVML"}, ["reports no GPUs: no NVML", "docs/gpus.md"]),
        ({}, {"agent_version": "0.0.1"}, [f"its agent is 0.0.1, this is {__version__}", "install the same"]),
        (
            {"drained": True, "drain_reason": "fan", "state": "ERROR"},
            {},
            ["no new leases (fan)", "gpu-manager resume gpu-a"],
        ),
        (
            {"drained": True, "drain_reason": "not searched since a restore", "state": "DRAINED"},
            {},
            ["no new leases (not searched since a restore)"],
        ),
        (
            {"gpus_closed": [{"gpu_id": 3, "reason": "XID 79"}]},
            {},
            ["GPU 3 is closed (XID 79)", "gpu-manager resume gpu-a --gpu 3"],
        ),
    ],
)
def test_a_fault_of_a_server(row: dict[str, Any], report: dict[str, Any], words: list[str]) -> None:
    [fault] = faults(checks.of_server(server(**row), use(**report), 100.0))
    assert [word for word in ["gpu-a: ", *words] if word not in fault] == []


def test_what_somebody_closed_on_purpose_is_no_fault_and_says_who_and_why() -> None:
    gpus = [{"gpu_id": 3, "reason": "drained; fans", "closed_by": "unix:ben@desk"}]
    row = server(drained=True, drain_reason="move", drained_by="ada", state="DRAINED", gpus_closed=gpus)
    first, second = checks.of_server(row, use(), 100.0)
    assert (first.ok, first.text) == (True, "gpu-a: drained by ada (move): gpu-manager resume gpu-a")
    assert second.ok
    assert second.text.startswith("gpu-a: GPU 3 is closed by unix:ben@desk (drained; fans): gpu-manager")


def test_a_wrong_key_for_stored_jobs_is_not_called_a_wrong_store() -> None:
    found = checks.of_store_out_of_reach("GPU_MANAGER_JOB_KEYS has Fernet keys with spaces", "redis://store")
    assert found.text == "redis://store: GPU_MANAGER_JOB_KEYS has Fernet keys with spaces"


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("server gpu-a does not answer by ssh: Host key for server 'gpu-a' does not match", "ssh-keygen -R"),
        ("server gpu-a does not answer by ssh: Server 'gpu-a' not found in known_hosts", "log in once"),
        ("server gpu-a does not answer by ssh: Authentication failed.", "ssh-copy-id"),
        ("server gpu-a does not answer by ssh: [Errno 113] No route to host", "check its address"),
        ("server gpu-a does not answer by ssh: timed out", "firewall"),
        ("server gpu-a has no python3, which is needed there", "install python3 there"),
        ("server gpu-a has no address in the inventory", "address = "),
        ("something new", "docs/gpus.md"),
    ],
)
def test_a_server_that_does_not_answer(error: str, step: str) -> None:
    finding = checks.of_answer("gpu-a", ResourceManagerError(error))
    assert (finding.ok, "gpu-a" in finding.text, step in finding.text) == (False, True, True)


def test_a_server_whose_jobs_cannot_have_their_walls() -> None:
    assert checks.of_walls("gpu-a", "").ok
    [fault] = faults([checks.of_walls("gpu-a", "bwrap is missing: install bubblewrap")])
    assert fault.startswith('gpu-a: no job starts, since confine = "must" and bwrap is missing: install')


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("Airflow at http://a answered 401 to GET /api/v2/plugins", "give --airflow-user and"),
        ("Airflow at http://a refused the login with status 401", "GPU_MANAGER_AIRFLOW_USER"),
        ("Airflow at http://a answered 403 to GET /api/v2/monitor/health", "let this user read"),
        ("no answer from Airflow at http://a: refused", "start it, or correct --airflow-url"),
    ],
)
def test_an_airflow_that_does_not_answer(error: str, step: str) -> None:
    assert step in checks.of_airflow_out_of_reach(error).text


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({"triggerer": "unhealthy"}, "its triggerer is unhealthy: start one, airflow triggerer"),
        ({"scheduler": None}, "its scheduler is missing: start one, airflow scheduler"),
        ({"plugins": ["other"]}, "the plugin is not loaded: install this package"),
        ({"reconcile": True}, "the DAG gpu_reconcile is paused: airflow dags unpause gpu_reconcile"),
        ({"reconcile": None}, "no DAG gpu_reconcile: put reconcile_dag()"),
        ({"instance": None}, "it has no instance id: restart its API server"),
    ],
)
def test_a_fault_of_airflow(change: dict[str, Any], step: str) -> None:
    [fault] = faults(checks.of_airflow({**HEALTHY, **change}))
    assert fault.startswith(step)


def test_a_full_disk_and_a_cluster_that_is_not_as_its_file() -> None:
    assert faults([checks.of_disk("/jobs", 1 << 20)])[0].startswith("/jobs: 0.0 GiB free: make room")
    notice = "servers.toml differs (2 lines): gpu-manager diff"
    assert faults(checks.of_cluster({}, [notice])) == [notice]


def test_a_token_of_an_agent_whose_reports_are_not_taken_is_found() -> None:
    of_agent = Token("1", "agent of gpu-a", "agent", "", 0.0, server="gpu-a")
    tokens = [of_agent, Token("2", "olga", "operator", "", 0.0)]

    def texts(used_at: float, reported_at: dict[str, float], servers: Any = ("gpu-a",)) -> list[str]:
        uses = {"1": used_at, "2": 995.0}
        return faults(checks.of_agent_tokens(tokens, uses, reported_at, servers, 1000.0))

    for reported_at in ({}, {"gpu-a": 500.0}):
        [text] = texts(995.0, reported_at)
        assert text.startswith("gpu-a: its agent's token is in use, but no report of it is taken: ")
        assert text.index("journalctl") < text.index("another server"), "its log tells what was refused"
        [text] = texts(995.0, reported_at, ())
        assert text.endswith("has no such server: stop its agent, then gpu-manager token revoke 1")
    assert texts(995.0, {"gpu-a": 997.0}) == []
    assert texts(960.0, {"gpu-a": 960.0}) == [], "an agent that has just ended"
    assert texts(5.0, {}) == [], "nobody uses it"
    assert texts(1120.0, {"gpu-a": 997.0}) == [], "the clock of the service is not that of the store"


def test_a_copied_instance_id_is_found() -> None:
    [text] = faults(checks.of_instance("k7wd", [TaskIdentity("k7wd", "d", "r", "t")]))
    assert text.startswith("1 lease with its instance id k7wd of no task of it, such as d.t: another Airflow")
    assert checks.of_instance("k7wd", []) == []
