"""Passwords and tokens: absent from errors, logs and representations."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, ResourceManagerError, Settings
from resource_manager.agent.sending import ReportSender
from resource_manager.cli.program import main
from resource_manager.cli.target import Target
from resource_manager.errors import InvalidRequestError, redact
from resource_manager.rest import tokens
from resource_manager.rest.assemble import Persistence, persistence_of
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.private_file import secret_in
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role, TokenFile

ROOT = Path(__file__).parents[2]
SECRET = "hunter2"  # pragma: allowlist secret
URLS = (
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"rediss://ada:{SECRET}@127.0.0.1:1/0",
    f"redis://ada:a@{SECRET}@127.0.0.1:1/0",
    f"redis://127.0.0.1:1/0?password={SECRET}",
    f"redis+sentinel://:{SECRET}@127.0.0.1:1/x/0?sentinel_password={SECRET}",
    f"redis+sentinel://:{SECRET}@127.0.0.1:1",
    f"redis://:{SECRET}?x@127.0.0.1:1/0",
    f"redis://:\u2100{SECRET}@127.0.0.1:1/0",  # which urllib refuses, and quotes
    f"postgresql://ada:{SECRET}?x@127.0.0.1/x",
    f"mysql://ada:{SECRET}?x@127.0.0.1/x",
    f"sqlite://ada:{SECRET}?x@127.0.0.1/x",
    f"redis://:{SECRET}@127.0.0.1:port/0",
    f"unix://:{SECRET}@/nowhere/redis.sock",
    f"redis://:{SECRET}]@127.0.0.1:1/0",
    f"postgresql://ada:{SECRET}@127.0.0.1:1/x",
    f"postgresql://ada:{SECRET}@127.0.0.1:port/x",
    f"postgresql://ada:%zz{SECRET}@127.0.0.1:1/x",
    f"postgresql://127.0.0.1:1/x?password={SECRET}",
    f"postgresql://127.0.0.1:1/x?passwort={SECRET}",
    f"mysql://ada:{SECRET}@127.0.0.1:1/x",
    f"mysql://ada:{SECRET}@127.0.0.1:port/x",
    f"mysql://ada:{SECRET}@127.0.0.1:1",
    f"sqlite://ada:{SECRET}@127.0.0.1/x",
    f"wrong://:{SECRET}@127.0.0.1",
    f"redis://:{SECRET}@127.0.0.1:1/0?namespace={{{SECRET}}}",
)


@pytest.mark.parametrize("url", URLS)
def test_no_error_of_a_store_contains_the_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(ResourceManagerError) as caught:
        GPUResourceManager.from_url(url).get_resource_summary()
    if "namespace" not in url:
        assert SECRET not in str(caught.value)
    assert SECRET not in caplog.text.replace(f"namespace={{{SECRET}}}", "")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("rest", [f"{SECRET}?x", f"{SECRET}/x"])
@pytest.mark.parametrize("connect", [ServiceClient, ReportSender])
def test_no_error_about_the_address_of_a_service_contains_its_password(
    connect: Callable[[str], object], rest: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        connect(f"http://ada:{rest}@127.0.0.1:1")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", URLS[:-1])
def test_redaction_removes_passwords_and_keeps_the_address(url: str) -> None:
    assert SECRET not in redact(url)
    assert redact("redis://ada:pw@h:1/0?x=y") == "redis://ada@h:1/0"  # pragma: allowlist secret
    assert redact("memory://") == "memory://"


def test_settings_show_no_password() -> None:
    settings = Settings(store=URLS[0], redis_url=URLS[1])
    for text in (repr(settings), str(settings), f"{settings}"):
        assert SECRET not in text
        assert "127.0.0.1:1/0" in text
    assert settings.store == URLS[0]


def test_an_invalid_setting_does_not_reveal_the_others() -> None:
    with pytest.raises(ResourceManagerError) as caught:
        Settings.load({"GPU_MANAGER_STORE": URLS[0], "GPU_MANAGER_CACHE_TTL_S": SECRET})
    assert SECRET not in str(caught.value)


def test_the_representation_of_an_object_hides_its_secrets(
    service: Service, kept: Persistence, tmp_path: Path
) -> None:
    text = tokens.create(kept.tokens, "ada", Role.USER)
    secret = text.rpartition("_")[2]
    shown = [
        repr(service),
        repr(kept),
        repr(Target("http://x", text, f"redis://:{secret}@x")),
        repr(kept.tokens.read()),
        (tmp_path / "tokens.json").read_text(),
    ]
    for shown_text in shown:
        assert secret not in shown_text
        assert service.secret not in shown_text


def test_files_with_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = persistence_of(Settings(store="memory://"), tmp_path / "sub" / "tokens.json")
        tokens.create(made.tokens, "ada", Role.USER)
        tokens.create(made.tokens, "bob", Role.USER)
    finally:
        os.umask(before)
    for path in (tmp_path / "sub").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert len(TokenFile(tmp_path / "sub" / "tokens.json").read()) == 2


@pytest.mark.parametrize("name", ["tokens.json", "session-secret", "sessions.json"])
def test_a_file_planted_by_another_user_is_not_trusted(
    name: str, tmp_path: Path, as_another_user: Callable[[], None]
) -> None:
    """A known secret signs anybody's session, and a row among the tokens makes an operator."""
    made = persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")
    token_id = tokens.create(made.tokens, "ada", Role.OPERATOR).split("_")[1]
    made.sessions.begin(token_id, "s")

    def use() -> None:
        again = persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")
        assert set(again.tokens.read()) == {token_id}
        assert again.sessions.is_live(token_id, "s")

    use()
    path = tmp_path / name
    path.chmod(0o622)
    with pytest.raises(ResourceManagerError, match=f"{name} may be changed by others"):
        use()
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        as_another_user()
    with pytest.raises(ResourceManagerError, match="belongs to another user") as caught:
        use()
    assert len(str(caught.value).splitlines()) == 1


def test_a_secret_that_others_may_read_signs_nothing(tmp_path: Path) -> None:
    persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")
    (tmp_path / "session-secret").chmod(0o644)
    with pytest.raises(ResourceManagerError, match="may be read by others"):
        persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")


def test_a_secret_of_root_may_be_read_by_a_group(tmp_path: Path, as_another_user: Callable[[], None]) -> None:
    """So Kubernetes mounts it for a process that is not root."""
    if os.geteuid() != 0:
        pytest.skip("only root has files of root")
    path = tmp_path / "secret"
    path.write_text("s3cret")
    path.chmod(0o440)
    with pytest.raises(ResourceManagerError, match="may be read by others"):
        secret_in(path)
    as_another_user()
    assert secret_in(path) == "s3cret"
    path.chmod(0o444)
    with pytest.raises(ResourceManagerError, match=r"may be read by others .* chmod 640 and chgrp"):
        secret_in(path)


def test_a_secret_is_the_same_from_an_editor_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\xef\xbb\xbfs3cret\r\n")
    path.chmod(0o600)
    assert secret_in(path) == "s3cret"


def test_the_client_does_not_reveal_the_credentials_in_its_url() -> None:
    client = ServiceClient(f"http://ada:{SECRET}@127.0.0.1:1", f"gpm_1_{SECRET}")
    with pytest.raises(ResourceManagerError) as caught:
        client.get_resource_summary()
    client.close()
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(client)


@pytest.mark.parametrize("around", ["{}\n", " {}", "{}\r\nX: y", "{}…"])
def test_an_invalid_token_is_refused_without_being_shown(around: str) -> None:
    with pytest.raises(InvalidRequestError, match="the token has a space") as caught:
        ServiceClient("http://127.0.0.1:1", around.format(SECRET))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", URLS[:-1])
def test_the_command_line_shows_no_password(url: str) -> None:
    result = CliRunner().invoke(main, ["--store", url, "status"], env={"GPU_MANAGER_REDIS_URL": url})
    assert result.exit_code in (2, 3)
    assert SECRET not in result.output + result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_known_fencing_token_gives_no_right_to_the_lease(as_role: Callable[..., FlaskClient]) -> None:
    """Readers see the tokens of leases; only the owner or an operator may act on a lease."""
    ada, bob = as_role(Role.USER, "ada"), as_role(Role.USER, "bob")
    assert ada.post("/api/allocate", json={"task_id": "t", "required_gpus": 2, "required_cpus": 1}).json
    (lease,) = bob.get("/api/leases").json["items"]  # type: ignore[index]
    for path in ("/api/release", "/api/renew"):
        known = {"task_id": "t", "fencing_token": lease["fencing_token"]}
        assert bob.post(path, json=known).status_code == 403
    assert as_role(None).get("/api/leases").status_code == 401


def test_compose_gives_no_dag_a_secret_of_the_manager() -> None:
    """A DAG reads what its worker has: an operator's token and the store's password were among that."""
    services = yaml.safe_load(
        (ROOT / "resource_manager" / "deploy" / "compose" / "docker-compose.yml").read_text()
    )["services"]
    with_store = {name for name, service in services.items() if "REDIS_PASSWORD" in json.dumps(service)}
    sentinels = {"sentinel-1", "sentinel-2", "sentinel-3"}
    assert with_store == {"redis", "redis-replica", "gpu-cluster", "gpu-manager", *sentinels}
    with_tokens = {name for name, service in services.items() if "gpu-tokens:" in json.dumps(service)}
    assert with_tokens == {"airflow-init", "gpu-manager", "gpu-connection", "prometheus"}
    assert "tokens/user.token" in json.dumps(services["gpu-connection"])
    of_airflow = {name for name in services if "AIRFLOW__CORE__EXECUTOR" in json.dumps(services[name])}
    assert of_airflow >= {"airflow-worker", "airflow-triggerer", "airflow-apiserver"}
    assert not of_airflow & with_store
