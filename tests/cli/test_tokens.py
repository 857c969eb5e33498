"""Tokens are created, listed and revoked, and never stored in plain text."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from resource_manager.cli import main
from resource_manager.rest import tokens
from resource_manager.rest.tokens import Role, TokenFile


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_a_token_is_stored_as_a_hash(tokens_file: Path) -> None:
    base = ["--store", "memory://", "token"]
    made = CliRunner().invoke(
        main, [*base, "create", "ada", "--role", "operator", "--tokens", str(tokens_file), "--json"]
    )
    text = json.loads(made.stdout)["token"]
    assert text.split("_", 2)[2] not in tokens_file.read_text()
    assert tokens_file.stat().st_mode & 0o077 == 0
    listed = json.loads(
        CliRunner().invoke(main, [*base, "list", "--tokens", str(tokens_file), "--json"]).stdout
    )
    assert [(item["name"], item["role"]) for item in listed] == [("ada", "operator")]
    revoke = [*base, "revoke", listed[0]["token_id"], "--tokens", str(tokens_file)]
    assert CliRunner().invoke(main, revoke).exit_code == 0
    assert CliRunner().invoke(main, revoke).exit_code == 1


@pytest.mark.parametrize("command", [["list"], ["create", "ada"], ["revoke", "0"], ["rotate", "0"]])
def test_token_commands_refuse_the_url_of_a_service(command: list[str]) -> None:
    result = CliRunner().invoke(main, ["--url", "http://127.0.0.1:1", "token", *command])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "leave out --url" in result.stderr


def test_concurrent_writers_lose_no_token(tokens_file: Path) -> None:
    def make() -> None:
        for _ in range(25):
            tokens.create(TokenFile(tokens_file), "ada", Role.USER)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TokenFile(tokens_file).read()) == 100


def test_a_broken_token_file_is_not_overwritten(tokens_file: Path) -> None:
    tokens_file.write_text("{")
    result = CliRunner().invoke(
        main, ["--store", "memory://", "token", "create", "ada", "--tokens", str(tokens_file)]
    )
    assert result.exit_code == 2
    assert tokens_file.read_text() == "{"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_serve_refuses_a_public_address_without_tokens(tokens_file: Path, host: str) -> None:
    result = CliRunner().invoke(
        main, ["--store", "memory://", "serve", "--host", host, "--tokens", str(tokens_file)]
    )
    assert result.exit_code == 2
    assert "token create" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a\x1b[2J"], "NAME"),
        (["ada", "--team", "\x1b[2J"], "--team"),
        (["ada", "--role", "agent", "--server", "\x1b[2J"], "--server"),
    ],
)
def test_a_name_that_would_steer_a_terminal_is_refused_by_its_option(
    arguments: list[str], named: str, tokens_file: Path
) -> None:
    base = ["--store", "memory://", "token", "create", "--tokens", str(tokens_file)]
    refused = CliRunner().invoke(main, [*base, *arguments])
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"Error: {named} has a control or an invisible character: ")
    assert not tokens_file.exists()


def invoke(tokens_file: Path, *arguments: str) -> Result:
    base = ["--store", "memory://", "token", arguments[0], "--tokens", str(tokens_file)]
    return CliRunner().invoke(main, [*base, *arguments[1:]])


def test_a_token_is_made_with_an_end_listed_with_its_last_use_and_rotated(tokens_file: Path) -> None:
    made = json.loads(invoke(tokens_file, "create", "ada", "--expires", "90d", "--json").stdout)
    assert made["expires_at"] - made["created_at"] == 90 * 86_400
    TokenFile(tokens_file).note_use(made["token_id"], 1_700_000_000.0)
    (listed,) = json.loads(invoke(tokens_file, "list", "--json").stdout)
    assert (listed["expires_at"], listed["last_used_at"]) == (made["expires_at"], 1_700_000_000.0)
    shown = invoke(tokens_file, "list").stdout
    assert (made["token_id"] in shown, "in 90.0 d" in shown, " d ago" in shown) == (True, True, True)
    rotated = json.loads(invoke(tokens_file, "rotate", made["token_id"], "--overlap", "1h", "--json").stdout)
    assert rotated["token"] != made["token"]
    assert rotated["expires_at"] - rotated["created_at"] == pytest.approx(90 * 86_400)
    assert {row["token_id"] for row in json.loads(invoke(tokens_file, "list", "--json").stdout)} == {
        made["token_id"],
        rotated["token_id"],
    }


def test_an_expired_token_is_shown_as_such(tokens_file: Path) -> None:
    tokens.create(TokenFile(tokens_file), "ada", Role.USER, expires_s=60.0, now=lambda: 1_700_000_000.0)
    assert "expired" in invoke(tokens_file, "list").stdout.split()


@pytest.mark.parametrize("end", ["0", "-1d", "ten days", "2000d", "nan", "1e9d"])
def test_an_end_that_is_no_duration_makes_no_token(end: str, tokens_file: Path) -> None:
    refused = invoke(tokens_file, "create", "ada", "--expires", end)
    assert (refused.exit_code, "--expires" in refused.stderr) == (2, True)
    assert not tokens_file.exists()


@pytest.mark.parametrize("command", ["rotate", "revoke"])
def test_a_command_for_an_unknown_token_changes_nothing(command: str, tokens_file: Path) -> None:
    made = json.loads(invoke(tokens_file, "create", "ada", "--json").stdout)
    before = tokens_file.read_text()
    refused = invoke(tokens_file, command, "abc")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "there is no token 'abc': gpu-manager token list shows the ids" in refused.stderr
    assert tokens_file.read_text() == before
    assert made["token_id"] in before
