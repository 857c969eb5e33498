"""The commands of docs/restore.md, while jobs come and go and the database is lost."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from resource_manager import GPUResourceManager
from tests.builders import nodes
from tests.eventually import wait_for
from tests.sql_servers import Postgres

PAGE = (Path(__file__).parents[2] / "docs" / "restore.md").read_text()
BACKUP, RESTORE, RESUME = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
TTL_S = 3.0
OWNERS = 5
SERVERS = tuple(replace(each, name=f"gpu-{each.name}") for each in nodes("ab", gpus=8, cpus=64))

OWNER = """
import json, random, subprocess, sys, time
from pathlib import Path
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.manager.manager import GPUResourceManager

url, name, ledger, stop = *sys.argv[1:3], *map(Path, sys.argv[3:5])
ttl_s = float(sys.argv[5])
manager, number = GPUResourceManager.from_url(url, lock_timeout_s=2.0), 0

def note(word, lease):
    with ledger.open("a") as file:
        places = [[lease["server_name"], gpu] for gpu in lease["gpu_ids"]]
        file.write(json.dumps([word, f"{name}-{number}", places, time.monotonic()]) + "\\n")

while not stop.exists():
    number += 1
    asked_at = time.monotonic()
    try:
        lease = manager.allocate_resources(f"{name}-{number}", 2, 1)
    except ResourceManagerError:
        lease = None
    if lease is None:
        time.sleep(0.1)
        continue
    job = subprocess.Popen(["sleep", "600"])
    note("begin", lease)
    ends_at, token = asked_at + ttl_s, lease["fencing_token"]
    is_done = time.monotonic() + random.uniform(0.5, 6.0)
    while time.monotonic() < min(is_done, ends_at - 0.5):
        asked_at = time.monotonic()
        try:
            manager.renew(f"{name}-{number}", fencing_token=token)
            ends_at = asked_at + ttl_s
        except LeaseNotFoundError:
            break
        except ResourceManagerError:
            pass
        time.sleep(0.2)
    job.kill()
    job.wait()
    note("end", lease)
    try:
        manager.release_resources(f"{name}-{number}", fencing_token=token)
    except ResourceManagerError:
        pass
"""
"""The owner of one job after another: it renews its lease, and stops the job when it has none any more."""


def lose_redis(url: str) -> None:
    address, _, namespace = url.partition("?namespace=")
    with closing(redis.Redis.from_url(address)) as client:
        for key in list(client.scan_iter(f"{{{namespace}}}:*")):
            client.delete(key)


def lose_sqlite(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=30)) as file, file:
        for table in ("state", "snapshot", "change", "once", "lock"):
            file.execute(f"DELETE FROM gpu_manager_{table}")


@pytest.fixture(params=["embedded_redis", "postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], object]]:
    """Return the URL of a store and what loses it."""
    if request.param == "sqlite":
        path = tmp_path / "state.db"
        return f"sqlite:///{path}", lambda: lose_sqlite(path)
    server = request.getfixturevalue(request.param)
    url = server.fresh_url()
    if isinstance(server, Postgres):
        return url, lambda: server.psql("DROP SCHEMA gpu_manager CASCADE")
    return url, lambda: lose_redis(url)


def overlaps(ledger: Path) -> list[str]:
    """Return the GPUs on which two processes ran at the same time, by what the owners wrote down."""
    spans: dict[tuple[str, int], list[list[float | str]]] = defaultdict(list)
    for line in ledger.read_text().splitlines():
        word, name, places, at = json.loads(line)
        for server, gpu in places:
            if word == "begin":
                spans[server, gpu].append([at, float("inf"), name])
            else:
                next(span for span in spans[server, gpu] if span[2] == name)[1] = at
    return [
        f"{place}: {before[2]} and {after[2]}"
        for place, found in spans.items()
        for before, after in zip(sorted(found), sorted(found)[1:], strict=False)
        if float(after[0]) < float(before[1])
    ]


def begun(ledger: Path) -> int:
    return ledger.read_text().count('"begin"') if ledger.exists() else 0


def pasted(commands: str, url: str, folder: Path) -> str:
    """Return what the page's commands print."""
    output = ""
    for line in commands.splitlines():
        assert line.startswith("gpu-manager ")
        words = [sys.executable, "-m", "resource_manager.cli", "--store", url, *line.split()[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        output += done.stdout
    return output


def test_the_pages_commands_open_no_server_before_it_was_searched(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    url = f"sqlite:///{path}"
    with GPUResourceManager.from_url(url, inventory=SERVERS, confirmation_window_s=0.0) as manager:
        manager.allocate_resources("before", 2, 1)
        assert "it goes on" in pasted(BACKUP, url, tmp_path)
        manager.allocate_resources("after", 2, 1)
        lose_sqlite(path)
        assert "2 servers closed until searched for jobs" in pasted(RESTORE, url, tmp_path)
        assert manager.submit("new", 1)["state"] == "WAITING"
        pasted(RESUME, url, tmp_path)
        assert [lease["task_id"] for lease in manager.leases()] == ["before", "new"]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_drill_of_the_page_leaves_no_gpu_with_two_processes(
    store: tuple[str, Callable[[], None]], tmp_path: Path
) -> None:
    url, lose = store
    ledger, stop = tmp_path / "ledger", tmp_path / "stop"

    with ExitStack() as stack:
        cluster: dict[str, Any] = {"lease_ttl_s": TTL_S, "confirmation_window_s": TTL_S}
        with GPUResourceManager.from_url(url, inventory=SERVERS, **cluster):
            pass
        for number in range(OWNERS):
            words = [sys.executable, "-c", OWNER, url, f"job-{number}", str(ledger), str(stop), str(TTL_S)]
            owner = stack.enter_context(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            stack.callback(owner.wait, 60)
            stack.callback(stop.touch)
        wait_for(lambda: begun(ledger) >= OWNERS, 120)
        assert "it goes on" in pasted(BACKUP, url, tmp_path)
        at_noon = begun(ledger)
        wait_for(lambda: begun(ledger) >= at_noon + OWNERS, 120)
        lose()
        time.sleep(1.0)
        lost = begun(ledger)
        said = pasted(RESTORE, url, tmp_path)
        assert "2 servers closed until searched for jobs" in said
        assert said.count("DRAINED") == len(SERVERS)
        time.sleep(TTL_S + 1.0)
        assert begun(ledger) == lost, "nothing was granted before the servers were searched"
        pasted(RESUME, url, tmp_path)
        wait_for(lambda: begun(ledger) >= lost + OWNERS, 120)
    assert overlaps(ledger) == []
