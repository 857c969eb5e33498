"""Rights that docs/stores.md recommends for a Redis user: sufficient, and limited to the namespace."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import redis

from resource_manager import GPUResourceManager, Settings
from resource_manager.cli import main
from resource_manager.cli.bench import store
from resource_manager.errors import StoreError, StoreRefusedError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.tokens import Role
from resource_manager.storage import checks
from resource_manager.storage.redis.client import RIGHTS, RedisClient
from tests.builders import json_of
from tests.redis_server import EMBEDDED, RedisServer

OLD_RIGHTS = "+@read +@write +eval +evalsha +info +time +ping"
"""Rights recommended formerly; they include FLUSHALL and SWAPDB."""

ATTACKS = (
    "FLUSHALL",
    "FLUSHALL ASYNC",
    "FLUSHDB",
    "SWAPDB 0 1",
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "SELECT 1",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "DEBUG SLEEP 0",
    "SCRIPT FLUSH",
    "SCRIPT KILL",
    "FUNCTION FLUSH",
    "SHUTDOWN NOSAVE",
    "REPLICAOF 127.0.0.1 1",
    "CLIENT KILL TYPE normal",
    "ACL SETUSER default on nopass ~* +@all",
    "MONITOR",
    "GET {other}:meta",
    "SET {other}:meta x",
    "DEL {other}:meta",
    "RENAME {other}:meta {mine}:meta",
    "COPY {other}:meta {mine}:meta",
    "HGETALL {other}:leases",
    "XTRIM {other}:changes MAXLEN 0",
    "SORT {mine}:list BY nosort GET {other}:meta",
    "RESTORE {other}:x 0 x",
    "PUBLISH channel x",
)


@pytest.fixture
def server(own_redis_of_each_release: RedisServer) -> RedisServer:
    """Return a Redis for this test only, with keys of another namespace."""
    with own_redis_of_each_release.client() as admin:
        admin.set("{other}:meta", "precious")
        admin.rpush("{other}:list", "precious")
    return own_redis_of_each_release


def driver_of(url: str) -> Any:
    return RedisClient.from_url(url).driver


def tries(server: RedisServer, url: str, attack: str, *, in_script: bool) -> bool:
    """Return whether Redis executed the attack; syntax errors count, since Redis checks rights first."""
    namespace = url.partition("namespace=")[2]
    words = [word.replace("{mine}", f"{{{namespace}}}") for word in attack.split()]
    with closing(driver_of(url)) as driver:
        try:
            if in_script:
                driver.eval("return redis.call(unpack(ARGV))", 0, *words)
            else:
                driver.execute_command(*words)
        except redis.exceptions.ConnectionError:
            return True  # Redis stopped or closed the connection
        except redis.exceptions.ResponseError as error:
            text = str(error)
            refusals = (
                "has no permissions",
                "The user executing the script can't",
                "not allowed from script",
                "unknown command",
                "Unknown Redis command",
                "DEBUG command not allowed",
            )
            return not any(refusal in text for refusal in refusals)
    return True


@pytest.mark.parametrize("in_script", [False, True], ids=["as a command", "by EVAL"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_command_reaches_beyond_the_namespace(server: RedisServer, attack: str, in_script: bool) -> None:
    assert not tries(server, server.limited_url(), attack, in_script=in_script)
    with server.client() as admin:
        assert admin.get("{other}:meta") == b"precious"


@pytest.mark.parametrize("attack", ["FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "KEYS *", "SCAN 0"])
def test_the_former_rights_reached_beyond_the_namespace(server: RedisServer, attack: str) -> None:
    """This shows that the test above can fail."""
    assert tries(server, server.limited_url(OLD_RIGHTS), attack, in_script=True)
    if attack not in ("KEYS *", "SCAN 0"):
        with server.client() as admin:
            assert admin.get("{other}:meta") is None


def test_a_service_needs_no_further_rights(server: RedisServer) -> None:
    """Tokens, sessions, cached answers, leases and the queue all work as that user."""
    url = server.limited_url()
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        kept = persistence_of(Settings(store=url))
        service = standalone(manager, kept)
        caller = create_app(service).test_client()
        caller.environ_base["HTTP_AUTHORIZATION"] = (
            f"Bearer {tokens.create(kept.tokens, 'ada', Role.OPERATOR)}"
        )
        payload = {"task_id": "t", "required_gpus": 8, "required_cpus": 1}
        for _ in range(2):
            answer = caller.post("/api/allocate", json=payload, headers={"Idempotency-Key": "k"})
            assert answer.status_code == 200
        assert answer.headers["Idempotent-Replay"] == "true"
        for number in range(4):
            assert caller.post("/api/submit", json={**payload, "task_id": f"w{number}"}).status_code == 200
        assert caller.post("/api/renew", json={"task_id": "t"}).status_code == 200
        assert caller.post("/api/release", json={"task_id": "t"}).status_code == 200
        assert json_of(caller.get("/api/history"))["items"]
        assert caller.get("/metrics").status_code == 200
        assert caller.post("/api/reset", json={"confirm": True}).status_code == 200
        service.watch.close()


@pytest.mark.parametrize(
    ("rights", "warns"),
    [
        (RIGHTS, False),
        (OLD_RIGHTS, True),
        (f"{OLD_RIGHTS} +acl", True),
        ("+@all", True),
        (f"{RIGHTS} +swapdb", True),
        (f"{RIGHTS} +flushall", True),
        (f"{RIGHTS} +flushdb", True),
        ("+ping", False),  # the rights are unknown
    ],
)
def test_a_redis_user_that_may_flush_is_reported(
    server: RedisServer, rights: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.limited_url(rights)
    with caplog.at_level(logging.DEBUG):
        checks.warn(Settings(store=url))
        checks.warn(Settings(store="airflow://", redis_url=url))
    namespace = url.partition("namespace=")[2]
    assert "secret" not in caplog.text
    told = [message for message in caplog.messages if "FLUSHALL" in message]
    assert len(told) == (2 if warns else 0)
    for message in told:
        assert "FLUSHALL" in message
        rule = f"reset on >PASSWORD ~{{{namespace}}}:* {RIGHTS}"
        assert f"ACL SETUSER <name> {rule} (see docs/stores.md)" in message
        assert message.isprintable()
    with server.client() as admin:
        assert admin.get("{other}:meta") == b"precious", "the check does not execute the commands"


BENCH_KEYS = "~{gpu_manager_bench_* ~gpu_manager_bench_lock"


def bench_user(server: RedisServer, rights: str) -> str:
    """The URL of a user who may use the benchmark's keys so."""
    with server.client() as admin:
        rules = ("reset", "on", ">secret", *BENCH_KEYS.split(), *rights.split())
        admin.execute_command("ACL", "SETUSER", "bench", *rules)
    return f"unix://bench:secret@{server.socket}"  # pragma: allowlist secret


def test_the_benchmark_works_with_the_rights_its_help_names(server: RedisServer) -> None:
    option = next(param for param in main.commands["bench"].params if param.name == "redis_url")
    assert isinstance(option, click.Option)
    for word in ("+scan", "+script|load", *BENCH_KEYS.split()):
        assert word in str(option.help)
    url = bench_user(server, f"{RIGHTS} +scan +script|load")
    with store.redis_server(url):
        store.lock_pair(url)()
        store.manager_pair(url, servers=4)()
    with server.client() as admin:
        assert sorted(admin.keys()) == [b"{other}:list", b"{other}:meta"]


def test_what_the_benchmark_may_not_clean_up_is_told_and_hides_nothing(server: RedisServer) -> None:
    url = bench_user(server, f"{RIGHTS} +script|load")
    with pytest.raises(StoreError, match=r"\+scan"), store.redis_server(url):
        pass
    with pytest.raises(ValueError, match="the first error"), store.redis_server(url):
        raise ValueError("the first error")


def test_no_warning_without_a_reachable_redis(caplog: pytest.LogCaptureFixture) -> None:
    checks.warn(Settings(store="memory://"))
    checks.warn(Settings(store="redis://127.0.0.1:1"))
    assert not caplog.messages


@pytest.mark.parametrize(("rights", "lines"), [("+@all", 1), (RIGHTS, 0)])
def test_the_service_warns_at_its_start(server: RedisServer, tmp_path: Path, rights: str, lines: int) -> None:
    command = [sys.executable, "-m", "resource_manager.cli", "--store", server.limited_url(rights), "serve"]
    environment = {**os.environ, "GPU_MANAGER_TOKENS": str(tmp_path / "tokens.json")}
    process = subprocess.Popen([*command, "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen: list[str] = []
    try:
        for line in process.stderr:
            seen.append(line)
            if "serving at" in line:
                assert httpx.get(f"{json.loads(line)['address']}/healthz", timeout=30).status_code == 200
                break
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert sum("FLUSHALL" in line for line in seen) == lines, seen


PAGE = (Path(__file__).parents[2] / "docs" / "stores.md").read_text().replace("PASSWORD", "secret")
[SETUSER] = [line for line in PAGE.splitlines() if line.startswith("ACL SETUSER")]


@pytest.mark.parametrize(
    ("line", "commands", "lasts"),
    [
        ("", (SETUSER,), False),
        ("aclfile users.acl", (SETUSER, "ACL SAVE"), True),
        ("", (SETUSER, "CONFIG REWRITE"), True),
        (SETUSER.replace("ACL SETUSER", "user"), (), True),
    ],
    ids=["running server only", "aclfile", "rewritten redis.conf", "line of redis.conf"],
)
def test_the_user_of_the_page_outlives_a_restart_if_it_was_made_to_last(
    tmp_path: Path, line: str, commands: tuple[str, ...], lasts: bool
) -> None:
    (tmp_path / "users.acl").touch()
    (tmp_path / "redis.conf").write_text(f"dir {tmp_path}\nappendonly yes\n{line}\n")
    program = tmp_path / "redis"
    program.write_text(f'#!/bin/sh\nexec {EMBEDDED} {tmp_path}/redis.conf "$@"\n')
    program.chmod(0o700)
    server = RedisServer(str(program), tmp_path)
    try:
        with server.client() as client:
            for command in commands:
                client.execute_command(*command.split())
        server.stop()
        server.start()
        settings = Settings(store=f"unix://gpu-manager:secret@{server.socket}")  # pragma: allowlist secret
        if lasts:
            assert all(finding.ok for finding in checks.check(settings))
        else:
            with pytest.raises(StoreRefusedError, match="it refused the login: check user and password"):
                checks.check(settings)
    finally:
        server.stop()
