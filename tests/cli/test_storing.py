"""`gpu-manager store`: databases are created and checked, states backed up and restored."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from resource_manager.cli import main
from resource_manager.storage.redis.client import RedisClient
from tests.redis_server import RedisServer
from tests.sql_servers import Postgres

SERVERS = str(Path(__file__).parents[2] / "resource_manager" / "deploy" / "servers.toml")


def run(store: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--store", store, *arguments])


def test_a_database_is_checked_created_and_checked_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    before = run(url, "store", "check")
    assert before.exit_code == 1
    assert 'MISSING  no table "gpu_manager_state"' in before.output
    assert "its tables are there" in run(url, "store", "create").output
    after = run(url, "store", "check", "--json")
    assert after.exit_code == 0, after.output
    assert all(finding["ok"] for finding in json.loads(after.stdout))


def test_a_check_names_the_rights_that_are_missing(postgresql: Postgres) -> None:
    assert run(postgresql.url, "store", "create").exit_code == 0
    postgresql.psql("DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN")
    url = postgresql.url.replace("postgres@", "reader@")
    nothing = run(url, "store", "check")
    assert nothing.exit_code == 1
    grant = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA gpu_manager TO reader;"
    assert f"lacks SELECT, INSERT, UPDATE, DELETE: GRANT USAGE ON SCHEMA gpu_manager TO reader; {grant}" in (
        nothing.output
    )
    assert "store create" not in nothing.output, "the tables are there"
    doctor = [line for line in run(url, "doctor").output.splitlines() if line.startswith("FAULT")]
    assert any("GRANT USAGE ON SCHEMA gpu_manager TO reader" in line for line in doctor), doctor
    refused = run(url, "allocate", "t", "--gpus", "2")
    assert refused.exit_code == 3
    assert "lacks rights" in refused.output
    postgresql.psql(
        "GRANT USAGE ON SCHEMA gpu_manager TO reader; "
        "GRANT SELECT ON ALL TABLES IN SCHEMA gpu_manager TO reader"
    )
    some = run(url, "store", "check")
    assert "tables: the user lacks INSERT, UPDATE, DELETE: GRANT USAGE" in some.output
    given = [line.partition(": GRANT ")[2] for line in some.output.splitlines() if ": GRANT " in line]
    postgresql.psql("".join(f"GRANT {statement}" for statement in given))
    assert "10 tables with all rights" in run(url, "store", "check").output
    assert run(f"{url}?namespace=rights", "apply", "--yes", SERVERS).exit_code == 0
    assert run(f"{url}?namespace=rights", "allocate", "t", "--gpus", "2").exit_code == 0
    postgresql.psql("DROP OWNED BY reader; DROP ROLE reader")


def test_a_check_tells_another_format_and_other_tables(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    assert run(url, "apply", "--yes", SERVERS).exit_code == 0
    assert run(url, "allocate", "t", "--gpus", "2").exit_code == 0
    with closing(sqlite3.connect(tmp_path / "state.db")) as file, file:
        file.execute("UPDATE gpu_manager_state SET format = 7")
    newer = run(url, "store", "check")
    assert newer.exit_code == 1
    assert "MISSING  the state of namespace gpu_manager was written in format 7" in newer.output
    with closing(sqlite3.connect(tmp_path / "state.db")) as file, file:
        file.execute("ALTER TABLE gpu_manager_state DROP COLUMN closed")
    other = run(url, "store", "check")
    assert "MISSING  its tables are of another version of this software" in other.output
    assert "lacks" not in other.output


def test_a_check_tells_a_state_that_cannot_be_read(tmp_path: Path, own_redis: RedisServer) -> None:
    """Also where the store has other faults, as a Redis that does not keep its data."""
    url = f"sqlite:///{tmp_path}/state.db"
    for each in (url, own_redis.url):
        assert "can be read" not in run(each, "store", "check").output, "there is none"
        assert run(each, "apply", "--yes", SERVERS).exit_code == 0
        assert "ok       the state can be read (version 1)" in run(each, "store", "check").output
    with closing(sqlite3.connect(tmp_path / "state.db")) as file, file:
        file.execute("UPDATE gpu_manager_snapshot SET body = '{'")
    with own_redis.client() as client:
        client.hset(RedisClient.from_url(own_redis.url).key("leases"), "a", "{")
        client.config_set("appendonly", "no")
    for each in (url, own_redis.url):
        check = run(each, "store", "check")
        assert check.exit_code == 1
        assert re.search("MISSING  .*; restore its data, or start over with a reset", check.output), check


def test_leases_and_tokens_move_to_another_store(tmp_path: Path) -> None:
    old, new = f"sqlite:///{tmp_path}/old.db", f"sqlite:///{tmp_path}/new.db?namespace=two"
    file = str(tmp_path / "state.json")
    assert run(old, "apply", "--yes", SERVERS).exit_code == 0
    assert run(old, "allocate", "train", "--gpus", "2").exit_code == 0
    assert run(old, "token", "create", "--role", "reader", "ada").exit_code == 0
    early = run(old, "store", "backup", file)
    assert early.exit_code == 0, early.output
    assert "it goes on" in early.output
    assert run(old, "allocate", "more", "--gpus", "2").exit_code == 0, "a backup stops nothing"
    final = run(old, "store", "backup", "--final", "--to", new, file)
    assert final.exit_code == 0, final.output
    assert "2 leases, 0 pending requests, 1 token" in final.output
    assert f"gpu-manager --store '{new}' store restore {file}" in final.output
    refused = run(old, "release", "train")
    assert refused.exit_code == 3
    assert f"set GPU_MANAGER_STORE to {new}, or take it back here" in refused.output
    restored = run(new, "store", "restore", file)
    assert restored.exit_code == 0, restored.output
    assert "2 leases, extended by the" in restored.output
    assert "1 token as of the backup: one that was revoked or rotated since is valid again" in restored.output
    assert "searched" not in restored.output
    leases = [lease["task_id"] for lease in json.loads(run(new, "leases", "--json").stdout)]
    assert leases == ["train", "more"]
    assert "ada" in run(new, "token", "list").output
    assert run(new, "release", "train").exit_code == 0
    assert "Error: /nowhere/f: No such file" in run(new, "store", "backup", "/nowhere/f").output
    again = run(new, "store", "restore", file)
    assert again.exit_code == 1
    assert "was restored here before" in again.output
    forced = run(new, "store", "restore", "--force", file)
    assert forced.exit_code == 0, forced.output
    assert "2 leases, those with a job extended by the" in forced.output
    assert "4 servers closed until searched for jobs" in forced.output
    assert "as of the backup" not in forced.output, "the store's own tokens stay"
    assert "not searched" in run(new, "explain", "--gpus", "2").output


def test_a_token_of_a_newer_version_keeps_no_other_from_being_restored(tmp_path: Path) -> None:
    old, new, file = f"sqlite:///{tmp_path}/old.db", f"sqlite:///{tmp_path}/new.db", tmp_path / "state.json"
    assert run(old, "apply", "--yes", SERVERS).exit_code == 0
    assert run(old, "token", "create", "ada").exit_code == 0
    assert run(old, "store", "backup", str(file)).exit_code == 0
    backup = json.loads(file.read_text())
    backup["tokens"].insert(0, {**backup["tokens"][0], "token_id": "x", "scope": "of a newer version"})
    file.write_text(json.dumps(backup))
    restored = run(new, "store", "restore", str(file))
    assert restored.exit_code == 0, restored.output
    assert [row["name"] for row in json.loads(run(new, "token", "list", "--json").stdout)] == ["ada"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "create"], "store create is for postgresql://, mysql://, sqlite:// only, not memory://"),
        (["store", "backup", "--to", "sqlite:///f", "f"], "--to goes with --final and is the URL of a store"),
        (["store", "backup", "--final", "--to", "elsewhere", "f"], "is the URL of a store, got 'elsewhere'"),
        (["store", "restore", "/nowhere/f"], "Error: /nowhere/f: No such file or directory"),
        (["store", "restore", SERVERS], f"Error: {SERVERS} is not a file of gpu-manager store backup"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], says: str) -> None:
    result = run("memory://", *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_file_that_could_not_be_opened_once_restored_changes_nothing(tmp_path: Path) -> None:
    """Such as one out of which somebody has cut a server."""
    old, new, file = f"sqlite:///{tmp_path}/old.db", f"sqlite:///{tmp_path}/new.db", tmp_path / "state.json"
    assert run(old, "apply", "--yes", SERVERS).exit_code == 0
    assert run(old, "allocate", "train", "--gpus", "2").exit_code == 0
    assert run(old, "store", "backup", str(file)).exit_code == 0
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "state": {**whole["state"], "nodes": []}}))
    refused = run(new, "store", "restore", str(file))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.output
    assert refused.stderr.startswith(f"Error: {file}: the state refers to server 'gpu-server-0'"), (
        refused.stderr
    )
    assert "holds no state" in run(new, "store", "backup", str(file)).stderr
