"""`run --sync`: the code of this machine where the job runs, over a real sshd or here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager.cli import main, syncing
from resource_manager.cli.base import Failure
from resource_manager.jobs.launchers import LauncherError
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


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(code: Path) -> None:
    os.truncate(code / "train.py", syncing.MAX_BYTES)
    with pytest.raises(Failure, match=r"name in \.gitignore what is data, such as .*train\.py"):
        syncing.check_folder(code)


def test_a_folder_is_that_of_the_caller_whatever_git_and_the_walls_begin_in(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one that is no repository had no files."""
    os.truncate(code / "train.py", syncing.MAX_BYTES)
    monkeypatch.chdir(code.parent)
    done = CliRunner().invoke(main, ["run", "--sync", code.name, "--", "true"])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: --sync {code}: 100 MB, at most 100;")


def test_a_git_that_fails_is_one_line_and_not_a_folder_without_files(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Failure, match="git does not list its files: fatal: bad config line"):
        syncing.check_folder(code)


def test_no_link_leads_out_of_the_folder(code: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    (code / "key").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(Failure, match=r"'key' is a link to .*/id_rsa', outside the folder"):
        syncing.check_folder(code)
    (code / "key").unlink()
    (code / "again").symlink_to(code / "train.py")
    assert "again" in syncing.check_folder(code)


def test_the_settings_of_a_repository_start_no_program(code: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    program = f"touch {tmp_path}/started; false"
    subprocess.run(["git", "-C", str(code), "config", "core.fsmonitor", program], check=True)
    assert "train.py" in syncing.check_folder(code)
    assert not (tmp_path / "started").exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of an account of this machine that the ssh program of this test logs in to."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    script = f"#!/bin/sh\nfor last; do :; done\nexport HOME='{tmp_path}/home'\nexec sh -c \"$last\"\n"
    (tmp_path / "bin" / "ssh").write_text(script)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path / "home"


def copied(code: Path, home: Path) -> dict[str, str]:
    where, _ = syncing.sync(code, "server", [])
    there = home / where.removeprefix("~/")
    return {
        path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()
    }


def test_a_copy_is_equal_whatever_the_names_of_the_files(code: Path, home: Path) -> None:
    for name in ("-rf", "two\nlines", "a", "a.sync", "a.new"):
        (code / name).write_text("1")
    kept = {".gitignore": "data/\n", "train.py": (code / "train.py").read_text(), "lib/name": "one"}
    names = {"-rf": "1", "two\nlines": "1", "a.sync": "1", "a.new": "1"}
    assert copied(code, home) == {**kept, **names, "a": "1"}
    (code / "a").write_text("2")
    assert copied(code, home) == {**kept, **names, "a": "2"}
    (code / "a").unlink()
    (code / "a").mkdir()
    (code / "a" / "b").write_text("3")
    assert copied(code, home) == {**kept, **names, "a/b": "3"}
    shutil.rmtree(code / "a")
    (code / "a").write_text("4")
    assert copied(code, home) == {**kept, **names, "a": "4"}


def test_the_folders_that_are_not_copied_are_named(
    code: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submodule = ["git", "-C", str(code), "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},module"]
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    subprocess.run(submodule, check=True)
    (code / "module").mkdir()
    (code / "sets").symlink_to(code / "data")
    assert "module" not in copied(code, home)
    assert f"--sync {code}: without 'module', 'sets': submodules," in capsys.readouterr().err


def test_no_file_of_the_folder_names_others_to_be_removed(code: Path, home: Path) -> None:
    (home / "authorized_keys").write_text("mine")
    (code / ".gpu-manager-sync").write_text('["../../../authorized_keys"]')
    copied(code, home)
    copied(code, home)
    assert (home / "authorized_keys").exists()


def test_nothing_is_written_or_removed_through_a_link_that_a_job_made(code: Path, home: Path) -> None:
    where, _ = syncing.sync(code, "server", [])
    there = home / where.removeprefix("~/")
    (home / "mine").mkdir()
    (home / "mine" / "name").write_text("mine")
    shutil.rmtree(there / "lib")
    (there / "lib").symlink_to(home / "mine")
    with pytest.raises(LauncherError, match="a job has put a link in place of lib there: remove it"):
        syncing.sync(code, "server", [])
    shutil.rmtree(code / "lib")
    syncing.sync(code, "server", [])
    assert (home / "mine" / "name").read_text() == "mine"


def test_what_a_job_wrote_over_a_file_stays_until_that_changes_here(code: Path, home: Path) -> None:
    """Without it a checkpoint was replaced by the next run, and removed once `.gitignore` named it."""
    where, _ = syncing.sync(code, "server", [])
    name = home / where.removeprefix("~/") / "lib" / "name"
    name.write_text("a job's")
    assert copied(code, home)["lib/name"] == "a job's"
    (code / "lib" / "name").write_text("two")
    assert copied(code, home)["lib/name"] == "two"
    name.write_text("a job's")
    (code / ".gitignore").write_text("data/\nlib/\n")
    assert copied(code, home)["lib/name"] == "a job's"


def test_a_file_that_did_not_arrive_is_not_taken_for_a_jobs(code: Path, home: Path) -> None:
    syncing.sync(code, "server", [])
    (code / "lib" / "name").write_text("two")
    ssh = home.parent / "bin" / "ssh"
    whole = ssh.read_text()
    ssh.write_text(whole.replace("exec sh", "head -n 1 | sh"))
    with pytest.raises(LauncherError, match="not copied to server"):
        syncing.sync(code, "server", [])
    ssh.write_text(whole)
    assert copied(code, home)["lib/name"] == "two"


def test_a_file_is_copied_again_once_it_may_be_run(code: Path, home: Path) -> None:
    syncing.sync(code, "server", [])
    (code / "train.py").chmod(0o755)
    where, sent = syncing.sync(code, "server", [])
    there = home / where.removeprefix("~/")
    assert (sent, (there / "train.py").stat().st_mode & 0o777) == (1, 0o755)
    assert syncing.sync(code, "server", [])[1] == 0


@pytest.mark.timeout(60)
def test_what_a_job_made_of_a_file_is_replaced_and_not_read(code: Path, home: Path) -> None:
    where, _ = syncing.sync(code, "server", [])
    there = home / where.removeprefix("~/")
    for name in ("train.py", "lib/name", ".gitignore"):
        (there / name).unlink()
    os.mkfifo(there / "train.py")
    (there / "lib" / "name").symlink_to("/dev/zero")
    (there / ".gitignore").symlink_to(code / ".gitignore")
    list_of_files = there.with_name(f"{there.name}.files")
    list_of_files.unlink()
    os.mkfifo(list_of_files)
    copied(code, home)
    assert not any(path.is_symlink() for path in there.rglob("*"))
    assert (there / "train.py").read_text() == (code / "train.py").read_text()
    (there / "train.py").unlink()
    (there / "train.py").mkdir()
    (code / "train.py").unlink()
    copied(code, home)
    assert (there / "train.py").is_dir(), "it is the job's, and keeps no copy from being made"


@pytest.mark.skipif(shutil.which("bwrap") is None or os.geteuid() != 0, reason="needs bubblewrap and root")
def test_a_file_that_cannot_be_read_is_one_line(code: Path) -> None:
    os.chown(code / "train.py", 1, 1)
    (code / "train.py").chmod(0o600)
    program = (
        "from pathlib import Path; from resource_manager.cli.syncing import sync; "
        f"from resource_manager.jobs.launchers import LauncherError\n"
        f"try: sync(Path({str(code)!r}), 'server', [])\nexcept LauncherError as error: print(error)"
    )
    alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--uid", "1000"]  # without the rights of root
    done = subprocess.run([*alone, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith(f"not copied to server: [Errno 13] Permission denied: '{code}/train.py'\n")


def test_what_a_bashrc_prints_is_no_answer(code: Path, home: Path) -> None:
    ssh = home.parent / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec sh", "echo '[1]'; printf 'no end of line'; exec sh"))
    assert set(copied(code, home)) == {".gitignore", "lib/name", "train.py"}


@pytest.mark.parametrize("answer", ['["/etc/passwd"]', "7", "[[1]]", "null", "{}", "no"])
def test_a_server_that_answers_otherwise_is_one_line(code: Path, home: Path, answer: str) -> None:
    ssh = home.parent / "bin" / "ssh"
    ssh.write_text(f"#!/bin/sh\nread line\necho 'lacking: {answer}'\ncat > {home}/got\n")
    with pytest.raises(LauncherError, match="not copied to server: no reason given"):
        syncing.sync(code, "server", [])
    assert "passwd" not in (home / "got").read_text()


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
            assert shown.split("\n")[:3] == ["lib", "train.py", "where"]
        finally:
            where, _ = run("cat", "where")
            shutil.rmtree(where.strip())
