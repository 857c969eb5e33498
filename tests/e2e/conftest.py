"""The machinery of the fault tests, started once for all of them."""

import os

import pytest

from tests.e2e.bench import SSHD, Bench, SSHServer, wait_for


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory):
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs sshd (Debian: openssh-server) and root")
    server = SSHServer(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="session")
def airflow(tmp_path_factory, ssh_server):
    """The stack, with the reconciler on; started once for all tests."""
    home = tmp_path_factory.mktemp("airflow")
    with Bench(home, ssh_server.port, AIRFLOW_CONN_TEST_SSH=ssh_server.connection) as bench:
        wait_for(lambda: bench.api.knows("gpu_reconcile"), what="gpu_reconcile")
        bench.api.call("PATCH", "/dags/gpu_reconcile", {"is_paused": False})
        yield bench


@pytest.fixture
def bench(airflow):
    """The stack, all free before; and after the test, whatever happened in it, the ledger is true."""
    airflow.check_free()
    yield airflow
    airflow.check_ledger()
    airflow.check_free()
