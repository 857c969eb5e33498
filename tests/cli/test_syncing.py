"""`run --sync`: the code of this machine where the job runs, over a real sshd or here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from resource_manager.cli import syncing
from resource_manager.cli.base import Failure
from tests.cli.programs import environment_of, manager_of, piped
from tests.e2e.servers import SSHServer, ssh_server
from tests.redis_server import RedisServer

__all__ = ["ssh_server"]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "my code"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("print('trains', open('lib/name').read())\n")
    (folder / "lib").mkdir()
    (folder / "lib" / "name").write_text("one")
    (folder / "data" / "big").write_text("x")
    (folder / ".gitignore").write_text("data/\n")
    return folder


def test_what_git_ignores_stays_in_a_repository_or_not(code: Path) -> None:
    names = [".gitignore", "lib/name", "train.py"]
    assert list(syncing.check_folder(code)) == names
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    assert list(syncing.check_folder(code)) == names
    assert list(syncing.check_folder(code / "lib")) == ["name"]


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncing, "MAX_BYTES", 20)
    with pytest.raises(Failure, match=r"name in \.gitignore what is data, such as .*train\.py"):
        syncing.check_folder(code)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_run_finds_the_code_and_only_what_changed_is_copied(
    code: Path, tmp_path: Path, embedded_redis: RedisServer, ssh_server: SSHServer
) -> None:
    environment = environment_of(tmp_path, embedded_redis.fresh_url(), ssh_server)

    def run(*command: str) -> tuple[str, str]:
        done = piped(environment, "run", "--sync", str(code), "--", *command)
        assert done.returncode == 0, done.stderr
        [copied] = [line for line in done.stderr.splitlines() if " copied to " in line]
        return done.stdout, copied.split()[1]

    with manager_of(environment):
        _, first = run("sh", "-c", "pwd > where; ls -a")
        try:
            assert first == "3"
            assert run("python3", "train.py") == ("trains one\n", "0")
            (code / "lib" / "name").write_text("two")
            (code / ".gitignore").unlink()
            shutil.rmtree(code / "data")
            assert run("python3", "train.py") == ("trains two\n", "1")
            shown, _ = run("sh", "-c", "ls -A; cat where")
            assert shown.split("\n")[:4] == [".gpu-manager-sync", "lib", "train.py", "where"]
        finally:
            where, _ = run("cat", "where")
            shutil.rmtree(where.strip())
