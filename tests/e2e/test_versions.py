"""The same few runs on every supported version of Airflow; `make test-airflow` runs them on one."""

import re
from importlib.util import find_spec

import httpx
import psutil
import pytest

from tests.builders import present
from tests.e2e.bench import Bench, wait_for
from tests.e2e.plugin import assert_loaded_once

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    """Stack without sshd, which would need root."""
    with Bench(tmp_path_factory.mktemp("airflow")) as bench:
        bench.switch_the_reconciler_on()
        yield bench


def test_the_plugin_serves_the_console_and_the_api_to_its_users_only(bench):
    assert_loaded_once(bench.api)
    own = {"Authorization": f"Bearer {bench.api.token}"}
    page = httpx.get(f"{bench.url}/gpu/", headers=own, follow_redirects=True, timeout=60)
    assert page.status_code == 200
    assert "by-ssh" in page.text
    summary = httpx.get(f"{bench.url}/gpu/api/status", headers=own, timeout=60).json()
    assert sum(server["total_gpus"] for server in summary["servers"]) == 24
    assert httpx.get(f"{bench.url}/gpu/api/status", timeout=60).status_code == 401
    to_login = httpx.get(f"{bench.url}/gpu/", headers={"Accept": "text/html"}, timeout=60)
    assert (to_login.status_code, "login" in to_login.headers["Location"]) == (303, True)


def test_the_connection_form_has_its_fields_and_a_working_test(bench):
    form = {"connection_id": "tried", "conn_type": "gpu_manager", "host": bench.store_url}
    answer = bench.api.call("POST", "/connections/test", form)
    assert answer["status"]
    assert answer["message"].startswith("3 servers, 24 of 24 GPUs free, seen from ")
    answer = bench.api.call("POST", "/connections/test", {**form, "host": "redis:/nowhere"})
    assert not answer["status"]
    assert "its host must be the URL of a store or of the service" in answer["message"]
    own = {"Authorization": f"Bearer {bench.api.token}"}
    known = httpx.get(f"{bench.url}/ui/connections/hook_meta", headers=own, timeout=60).json()
    (ours,) = (kind for kind in known if kind["connection_type"] == "gpu_manager")
    if find_spec("wtforms") or ours["standard_fields"]:  # 3.0 has neither without wtforms
        assert ours["standard_fields"]["host"]["title"] == "Store or service URL"


def test_a_retry_takes_the_lease_of_a_killed_worker_and_another_waits_for_it(bench):
    trains = bench.run("lingering_job", linger="asked")
    noted = bench.ledger.with_name("beats-asked")
    task = psutil.Process(int(wait_for(lambda: noted.exists() and noted.read_text(), 180, "lingering")))
    for process in (present(task.parent()), task):
        process.kill()
    waits = bench.run("local_job", seconds=1)
    waits.wait_until_waiting()
    trains.wait_until_deferred(try_number=2)
    wait_for(trains.beats, what="the start of the job")
    bench.both_end_well(trains, waits)
    assert re.search(r"waited \d+ (s|min) for GPUs: ", waits.log())


def test_a_task_marked_failed_stops_its_job(bench):
    run = bench.run("local_job")
    run.wait_until_training()
    run.mark("failed")
    run.wait_until("failed")
