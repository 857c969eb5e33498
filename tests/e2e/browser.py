"""Headless Chromium, axe, and the console as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.stack import REPOSITORY, free_ports

ARTIFACTS = REPOSITORY / "artifacts"
AXE = "axe-core@4.14.1"

INVENTORY = """[[servers]]
name = "gpu-server-{{id}}"
count = {count}
gpus = 8
gpu_type = "A100"
cpus = 64
"""


WAIT_MS = 20_000
"""Longest wait for a page to show what a test expects."""


def expect(what: Any) -> Any:
    """Return Playwright's assertions on a page or locator, which wait: a page may still be on its way."""
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=WAIT_MS)
    return playwright.expect(what)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a Playwright browser on Debian's Chromium; skip if either is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def axe_source() -> str:
    """Return axe's script, fetched once with npm into .build; skip if npm or its registry is missing."""
    script = REPOSITORY / ".build" / "axe.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("no npm to fetch axe-core with")
        script.parent.mkdir(exist_ok=True)
        packed = subprocess.run(
            [npm, "pack", AXE, "--json"], cwd=script.parent, capture_output=True, text=True, check=False
        )
        if packed.returncode:
            pytest.skip(f"npm cannot fetch {AXE}")
        archive = script.parent / json.loads(packed.stdout)[0]["filename"]
        with tarfile.open(archive) as content:
            member = content.extractfile("package/axe.min.js")
            assert member is not None
            script.write_bytes(member.read())
    return script.read_text(encoding="utf-8")


def serious(page: Any, source: str) -> list[str]:
    """Return the serious and critical findings of axe as lines of text."""
    page.evaluate(source)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{item['id']}: {item['help']}: {node['html'][:200]}"
        for item in found["violations"]
        if item["impact"] in ("serious", "critical")
        for node in item["nodes"]
    ]


class Service:
    """Running `gpu-manager serve`, with a client for each of its tokens."""

    def __init__(self, url: str, tokens: dict[str, str]) -> None:
        self.url = url
        self.tokens = tokens

    def client(self, name: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.tokens[name]}"}, timeout=30
        )


@contextmanager
def serving(folder: Path, servers: int, *options: str) -> Iterator[Service]:
    """Run the service on a store of its own, with tokens vera (reader), ursula (user), olga (operator)."""
    inventory = folder / "servers.toml"
    inventory.write_text(INVENTORY.format(count=servers))
    [port] = free_ports(1)
    store = f"sqlite:///{folder / 'store.db'}"
    base = [
        sys.executable,
        "-m",
        "resource_manager.cli",
        "--store",
        store,
    ]
    environment = {**os.environ, "GPU_MANAGER_TOKENS": str(folder / "tokens.json")}
    _output([*base, "apply", "--yes", str(inventory)], environment)
    tokens = {
        name: _output([*base, "token", "create", name, "--role", role], environment)
        for name, role in (("vera", "reader"), ("ursula", "user"), ("olga", "operator"))
    }
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*base, "serve", "--port", str(port), *options], env=environment, stderr=log
        )
        try:
            service = Service(f"http://127.0.0.1:{port}", tokens)
            _wait_for(f"{service.url}/healthz", process)
            yield service
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        try:
            httpx.get(url)
            return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


def log_in(page: Any, service: Service, name: str) -> None:
    page.goto(f"{service.url}/")
    page.get_by_label("Token").fill(service.tokens[name])
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Servers")).to_be_visible()


def picture(page: Any, name: str) -> None:
    """Save a screenshot as an artefact."""
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png")
