"""A real service that dies right after its commit: the same request, sent to the next one, acts once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from resource_manager import GPUResourceManager
from resource_manager.manager.cluster_file.servers import default_inventory
from tests.redis_server import RedisServer

SERVICE = """
import os, sys
from werkzeug.serving import make_server
from resource_manager import GPUResourceManager, RedisStore, Settings
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
url, dies = sys.argv[1], sys.argv[2] == "dies"
manager = GPUResourceManager.from_url(url)
app = create_app(standalone(manager, persistence_of(Settings(store=url)), open_to="loopback"))
commit = RedisStore.commit
def commit_and_die(*args, **options):
    commit(*args, **options)
    os.kill(os.getpid(), 9)
if dies:
    RedisStore.commit = commit_and_die
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.port, flush=True)
server.serve_forever(0.01)
"""


@contextmanager
def service(url: str, *, dies: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVICE, url, "dies" if dies else "lives"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/api/allocate", {"task_id": "t", "gpus": 2}, "granted"),
        ("/api/release", {"task_id": "held"}, "released"),
    ],
)
def test_a_change_survives_the_death_of_its_service(
    embedded_redis: RedisServer, path: str, body: dict[str, object], kind: str
) -> None:
    url = embedded_redis.fresh_url()
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        manager.allocate("held", 2)
        headers = {"Idempotency-Key": "k"}
        with service(url, dies=True) as (process, address):
            with pytest.raises(httpx.TransportError):
                httpx.post(address + path, json=body, headers=headers, timeout=60)
            assert process.wait(60) == -9
        if kind == "released":
            manager.allocate("held", 2)  # the next lease under the same id must live
        with service(url, dies=False) as (_, address):
            again = httpx.post(address + path, json=body, headers=headers, timeout=60)
        assert again.status_code == 200, again.text
        assert again.headers["Idempotent-Replay"] == "true"
        made = [change for change in manager.history() if change["change"] == kind]
        assert len(made) == (2 if kind == "granted" else 1)
        assert manager.status_of("held") is not None
