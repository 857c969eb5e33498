"""Fixtures of the end-to-end tests, started once for all.

`E2E_STORE=postgresql` chooses their store, `E2E_METADATA` with a URL of SQLAlchemy Airflow's own database.
"""

import os

import pytest

from tests.e2e.bench import Bench
from tests.e2e.servers import MailServer, Service, ssh_server

__all__ = ["ssh_server"]


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    """REST service; it runs once a test has started it."""
    return Service(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="session")
def mail():
    """Server behind the connection `smtp_default`."""
    with MailServer() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def airflow(tmp_path_factory, ssh_server, service, mail):
    """Stack with the reconciler switched on; started once for all tests."""
    home = tmp_path_factory.mktemp("airflow")
    settings = {
        "AIRFLOW_CONN_TEST_SSH": ssh_server.connection,
        "AIRFLOW_CONN_GPU_SERVICE": service.connection,
        "AIRFLOW_CONN_SMTP_DEFAULT": mail.connection,
    }
    if metadata := os.environ.get("E2E_METADATA"):
        settings["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = metadata
    store = os.environ.get("E2E_STORE", "redis")
    with Bench(home, ssh_server.port, store=store, **settings) as bench:
        bench.switch_the_reconciler_on()
        yield bench


@pytest.fixture
def bench(airflow):
    """Stack with all GPUs free; after the test, also a failed one, the ledger is checked."""
    airflow.check_free()
    yield airflow
    for run in airflow.runs:
        run.finish()
    airflow.runs.clear()
    airflow.check_ledger()
    airflow.check_free()
