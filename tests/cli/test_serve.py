"""`gpu-manager serve` as a separate process: it starts, answers, and stops on SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from click.testing import CliRunner
from cryptography.fernet import Fernet
from waitress.server import create_server

from resource_manager import Settings
from resource_manager.cli import main
from resource_manager.cli.serving import addresses, opening_of
from resource_manager.rest.assemble import persistence_of
from resource_manager.rest.tokens import Role, TokenFile, create
from resource_manager.storage.sql.database import Database
from tests.eventually import wait_for
from tests.rest.sign_on.openid_provider import CLIENT, OpenIdProvider

GPU_MANAGER = [sys.executable, "-m", "resource_manager.cli"]


@contextmanager
def serving(folder: Path, store: str, *options: str, **own: str) -> Iterator[str]:
    """Run the service on a port of its own and yield its address; it ends on SIGTERM, without an error."""
    command = [*GPU_MANAGER, "--store", store, "serve", "--port", "0", *options]
    keys = {"GPU_MANAGER_JOB_KEYS": Fernet.generate_key().decode()}
    environment = {**environment_in(folder), **keys, **own}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = json.loads(process.stderr.readline())
        if line["level"] == "warning":
            assert line["message"].startswith("there are no tokens, so whoever reaches this machine")
            line = json.loads(process.stderr.readline())
        assert line["message"].startswith("serving at http://127.0.0.1:")
        yield line["address"]
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
    assert process.returncode == 0, rest
    assert all(json.loads(text)["level"] != "error" for text in rest.splitlines())


def environment_in(folder: Path) -> dict[str, str]:
    own = {"GPU_MANAGER_TOKENS": str(folder / "tokens.json"), "XDG_STATE_HOME": str(folder)}
    return {**os.environ, **own}


@pytest.mark.parametrize("options", [[], ["--trusted-proxy", "127.0.0.1", "--behind-https"]])
def test_serve_starts_answers_and_stops(tmp_path: Path, options: list[str]) -> None:
    archive, audit = tmp_path / "history.jsonl", tmp_path / "audit.jsonl"
    files = ["--archive", str(archive), "--audit", str(audit)]
    with serving(tmp_path, "memory://", *files, *options) as address:
        body = {"task_id": "test_001", "required_gpus": 4, "required_cpus": 32}
        answer = httpx.post(f"{address}/api/allocate", json=body, timeout=30)
        assert answer.json()["gpu_devices"] == "0,1,2,3"
        assert httpx.get(f"{address}/", timeout=30).status_code == 200
    before, granted = map(json.loads, archive.read_text().splitlines())
    assert before["snapshot"]["version"] == 0
    assert granted["lease"]["request"]["lease_id"] == "test_001"
    assert json.loads(audit.read_text()) == granted


@pytest.mark.parametrize(
    ("role", "insecure", "opening"),
    [
        (None, True, "everyone"),
        (Role.AGENT, True, "everyone"),
        (Role.READER, True, ""),
        (None, False, "loopback"),
        (Role.AGENT, False, ""),
    ],
)
def test_a_service_starts_open_without_tokens_and_an_insecure_one_with_those_of_agents(
    role: Role | None, insecure: bool, opening: str, tmp_path: Path
) -> None:
    store = TokenFile(tmp_path / "tokens.json")
    if role is not None:
        create(store, "x", role, server="a" if role is Role.AGENT else "")
    assert opening_of(store.read(), "127.0.0.1", insecure=insecure) == opening


def test_it_serves_where_standard_error_is_closed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serve = [*GPU_MANAGER, "--store", "memory://", "serve", "--port", port]
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *serve]
    process = subprocess.Popen(closed, env=environment_in(tmp_path))

    def answers() -> bool:
        assert process.poll() is None
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/", timeout=30).status_code == 200
        return False

    try:
        wait_for(answers, 60.0)
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["one socket", "two"])
def test_a_service_that_ends_answers_the_requests_that_it_holds(host: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        with serving(tmp_path, "memory://", "--host", host) as address:
            path = f"{address}/api/leases/changes"
            version = httpx.get(path, timeout=30).json()["version"]
            query = {"after": version, "timeout_s": 25}
            held = [pool.submit(httpx.get, path, params=query, timeout=30) for _ in range(4)]
            wait_for(lambda: "http_held_requests 4.0" in httpx.get(f"{address}/metrics", timeout=30).text)
            ends_at = time.monotonic() + 20
        answers = [each.result(30) for each in held]
    assert time.monotonic() < ends_at
    assert [(each.status_code, each.json()["version"]) for each in answers] == [(200, version)] * 4


def test_a_session_secret_that_the_store_lost_is_stored_again(tmp_path: Path) -> None:
    """Else the next service signs with another one, and who logs in at one is a stranger at the other."""
    store = f"sqlite:///{tmp_path}/state.db"
    with serving(tmp_path, store, "--example", GPU_MANAGER_TOKENS=""):
        known = persistence_of(Settings(store=store)).secret
        Database(store).change("DELETE FROM {secret} WHERE namespace = :namespace")
    assert persistence_of(Settings(store=store)).secret == known


@pytest.fixture
def provider() -> Iterator[OpenIdProvider]:
    with OpenIdProvider(client_secret="s3cret") as provider:
        yield provider


@pytest.fixture
def signed_on_store(provider: OpenIdProvider, tmp_path: Path) -> str:
    """URL of a store whose cluster was applied with the section `[sign_on]`."""
    file, store = tmp_path / "cluster.toml", f"sqlite:///{tmp_path}/state.db"
    file.write_text(
        f'[[servers]]\nname = "a"\ngpus = 2\ncpus = 8\n[sign_on]\nissuer = "{provider.issuer}"\n'
        f'client_id = "{CLIENT}"\n[sign_on.groups.gpu-users]\nrole = "user"\nteams = ["vision"]\n'
    )
    command = [*GPU_MANAGER, "--store", store, "apply", "--yes", str(file)]
    done = subprocess.run(command, env=environment_in(tmp_path), capture_output=True, text=True)
    assert (done.returncode, "+ sign_on group gpu-users" in done.stdout) == (0, True), done.stderr
    return store


def test_people_sign_on_at_a_service_that_proves_itself_by_its_secret(
    signed_on_store: str, provider: OpenIdProvider, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    with serving(tmp_path, signed_on_store, "--sign-on-secret", str(secret)) as address:
        provider.redirect_uris = (f"{address}/signed-on",)
        stranger = httpx.get(f"{address}/api/status", timeout=30)
        assert stranger.status_code == 401, "on loopback, too, and though there is no token"
        with httpx.Client(base_url=address, follow_redirects=True, timeout=30) as browser:
            assert f"Log in with {provider.issuer}" in browser.get("/login").text
            answer = browser.get("/sign-on")
            assert re.search("<h1>Logged in</h1>", answer.text), answer.text
            assert browser.get("/api/caller").json() == {"name": "ada", "role": "user", "teams": ["vision"]}


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (b"s3cret", 0o644, "may be read by others"),
        (b"\n", 0o600, "there is no secret in it"),
        (b"\xff\xfes\x003\x00", 0o600, "is not UTF-8 text"),
        (None, 0, "no such file"),
    ],
)
def test_a_secret_that_others_read_or_that_is_not_there_is_one_line(
    text: bytes | None, mode: int, said: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    if text is not None:
        secret.write_bytes(text)
        secret.chmod(mode)
    options = ["--port", "0", "--tokens", str(tmp_path / "tokens.json"), "--sign-on-secret", str(secret)]
    done = CliRunner().invoke(main, ["--store", "memory://", "serve", *options])
    [line] = done.output.splitlines()
    assert (done.exit_code, said in line, str(secret) in line) == (2, True, True), line


@pytest.fixture
def used_port() -> Iterator[str]:
    """Yield a port at which no service can start, so that one that should not ends all the same."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


@pytest.mark.parametrize("name", ["tokens.json", "session-secret", "sessions.json"])
def test_a_broken_file_of_its_own_keeps_a_service_with_a_sign_on_from_starting(
    name: str, signed_on_store: str, used_port: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text("[{" if name == "tokens.json" else "secret")
    file.chmod(0o622)
    options = ["--port", used_port, "--tokens", str(tmp_path / "tokens.json")]
    done = CliRunner().invoke(main, ["--store", signed_on_store, "serve", *options])
    [line] = done.output.splitlines()
    assert (done.exit_code, f"{name} may be changed by others" in line) == (2, True), line


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "Address already in use"),
        ("nope.invalid", "no address of that name or port is known here"),
    ],
)
def test_an_address_that_cannot_be_bound_is_one_line_that_names_it(
    host: str, why: str, used_port: str, tmp_path: Path
) -> None:
    options = ["--host", host, "--port", used_port, "--insecure"]
    command = [*GPU_MANAGER, "--store", "memory://", "serve", *options]
    done = subprocess.run(command, env=environment_in(tmp_path), capture_output=True, text=True)
    line = f"Error: --host {host} --port {used_port}: {why}"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, line)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--trusted-proxy", "nginx", "'--trusted-proxy': must be an address such as 127.0.0.1"),
        ("--trusted-proxy", "10.0.0.0/8", "'--trusted-proxy': must be an address such as 127.0.0.1"),
        ("--trusted-proxy", "127.0.0.1, ::1", "'--trusted-proxy': must be an address such as 127.0.0.1"),
        ("--airflow-url", "airflow:8080", "--airflow-url must begin with http:// or https://, got 'airflow:"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(
    option: str, value: str, said: str, used_port: str, tmp_path: Path
) -> None:
    arguments = ["--store", "memory://", "serve", "--port", used_port, option, value]
    done = CliRunner().invoke(main, arguments, env=environment_in(tmp_path))
    assert (done.exit_code, said in done.output) == (2, True), done.output


def test_a_host_name_with_several_addresses_is_served_at_each() -> None:
    server = create_server(lambda environ, start: [], listen="127.0.0.1:0 127.0.0.1:0")
    try:
        assert len(set(addresses(server))) == 2
    finally:
        server.close()


def test_an_address_of_ipv6_is_a_url() -> None:
    server = SimpleNamespace(effective_host="::1", effective_port=5000)
    assert addresses(server) == ["http://[::1]:5000"]


def test_without_a_folder_for_temporary_files_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is read-only: the first long answer would find none."""
    monkeypatch.setattr("tempfile.gettempdir", Mock(side_effect=FileNotFoundError("no usable one")))
    done = CliRunner().invoke(main, ["--store", "memory://", "serve"])
    assert (done.exit_code, "--tmpfs /tmp" in done.output) == (2, True), done.output
