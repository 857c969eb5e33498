"""Checks of real stores: what is wrong is said, with what puts it right, also to a user with few rights."""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import subprocess
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager, Settings
from resource_manager.cli import main
from resource_manager.errors import StoreUnavailableError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.storage import checks, open_store
from resource_manager.storage.backup import write_backup
from resource_manager.storage.redis.client import RIGHTS
from tests.redis_server import RedisServer
from tests.sql_servers import MariaDB
from tests.storage.walk import started


def faults(url: str) -> list[str]:
    return [finding.text for finding in checks.check(Settings(store=url)) if not finding.ok]


def test_a_redis_that_keeps_its_data_has_no_fault(own_redis: RedisServer) -> None:
    assert faults(own_redis.limited_url()) == []


def test_a_redis_that_may_lose_leases_is_told_by_a_user_without_config(own_redis: RedisServer) -> None:
    url = own_redis.limited_url()
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
    assert faults(url) == [
        "maxmemory-policy allkeys-lru: it may drop leases; set noeviction in redis.conf",
        "appendonly no: a restart loses leases whose jobs run; set appendonly yes in redis.conf",
    ]
    assert faults("memory://") == []
    done = CliRunner().invoke(main, ["--store", url, "store", "check"])
    assert done.exit_code == 1
    assert "MISSING  maxmemory-policy allkeys-lru" in done.output
    assert "store create" not in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize("right", ["+info", "+eval", "+time", "+@write"])
def test_a_right_that_a_redis_user_lacks_is_named_with_its_rule(own_redis: RedisServer, right: str) -> None:
    rights = " ".join(word for word in RIGHTS.split() if word != right)
    [first, *_] = faults(own_redis.limited_url(rights))
    assert right in first.partition(":")[0]
    assert "ACL SETUSER <name> ~{" in first


def test_a_server_without_tls_is_thought_of_where_an_address_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # as a Redis is that waits for the end of a command
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        url = f"rediss://{address}/0?socket_timeout=0.05&socket_connect_timeout=0.05"
        with pytest.raises(
            StoreUnavailableError, match=r"if it has no TLS, its address begins with redis://$"
        ):
            checks.check(Settings(store=url))


def test_a_replica_is_told(own_redis: RedisServer) -> None:
    url = own_redis.limited_url()
    with own_redis.client() as client:
        client.replicaof("127.0.0.1", "1")
    assert "it is a replica, which is read-only: connect to the primary" in faults(url)


def test_a_state_that_cannot_be_reached_is_a_finding(own_redis: RedisServer) -> None:
    """As a Variable of an Airflow whose database is away, while its lock can be had."""
    url = own_redis.url
    own_redis.stop(signal.SIGKILL)
    [finding] = checks.of_state(Settings(store=url), [])
    assert not finding.ok
    assert "cannot be reached" in finding.text


@pytest.mark.parametrize("kind", ["own_redis", "sqlite"])
@pytest.mark.parametrize("most_s", [10.0, -1.0])
def test_a_closed_state_is_told_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, most_s: float, tmp_path: Path
) -> None:
    """Also where the store has another fault, such as a clock that is wrong."""
    monkeypatch.setattr("resource_manager.storage.finding.MAX_CLOCK_DIFFERENCE_S", most_s)
    url = request.getfixturevalue(kind).fresh_url()
    with closing(open_store(url)) as store:
        started(store)
        write_backup(store, tmp_path / "state.json", closing="it moved")
    done = CliRunner().invoke(main, ["--store", url, "store", "check"])
    assert (done.exit_code, done.output.count("the state is closed: it moved")) == (1, 1)
    assert "the state can be read" not in done.output


def test_the_redis_of_a_variable_holds_no_leases(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        client.config_set("appendonly", "no")
    found = checks.check(Settings(store="airflow://", redis_url=own_redis.limited_url()))
    assert all(finding.ok for finding in found)


def test_a_service_warns_of_each_fault_when_it_starts(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = own_redis.limited_url()
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
    with (
        caplog.at_level(logging.WARNING),
        GPUResourceManager.from_url(url, inventory=default_inventory()) as manager,
    ):
        standalone(manager, persistence_of(manager.settings)).watch.close()
    policy, keys = caplog.messages
    assert "maxmemory-policy volatile-ttl: it may drop leases" in policy
    assert "set GPU_MANAGER_JOB_KEYS" in keys
    assert "secret" not in policy + keys


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_command_that_makes_a_key_makes_one_that_is_taken(tmp_path: Path) -> None:
    settings = Settings(store=f"sqlite:///{tmp_path}/state.db")
    [keys] = checks.of_job_keys(settings)
    command = keys.text.partition("prints once: ")[2].removesuffix(" (see docs/stores.md)")
    key = subprocess.check_output(command, shell=True, text=True).strip()
    GPUResourceManager.from_url("memory://", job_keys=key).close()
    [encrypted] = checks.of_job_keys(settings.model_copy(update={"job_keys": key}))
    assert encrypted.ok


def test_an_account_of_mariadb_is_given_what_the_check_says(mariadb: MariaDB) -> None:
    name = f"user_{uuid.uuid4().hex[:8]}"
    mariadb.sql(f"CREATE USER {name}@'%'")
    CliRunner().invoke(main, ["--store", mariadb.url, "store", "create"])
    mariadb.sql(f"GRANT SELECT ON gpu_manager.once TO {name}@'%'")
    url = mariadb.url.replace("root@", f"{name}@")
    for fault in faults(url):
        assert "store create" not in fault
        mariadb.sql(f"GRANT {fault.partition(': GRANT ')[2]}")
    assert faults(url) == []
    mariadb.sql(f"DROP USER {name}@'%'")


def test_only_missing_tables_name_the_command_that_makes_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    assert all("run gpu-manager store create" in fault for fault in faults(url))
    assert len(faults(url)) == 10
    CliRunner().invoke(main, ["--store", url, "store", "create"])
    assert faults(url) == []
