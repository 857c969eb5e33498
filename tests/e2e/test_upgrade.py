"""Upgrade from older commits of this repository and back, as docs/upgrading.md has it; jobs run on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from demo.stack import REPOSITORY, free_ports
from tests.eventually import wait_for
from tests.faults.test_two_builds import Build, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OLDER = ("3c5e42d", "94d8434")
"""Commits from which people upgrade: both have stored format 1, and neither knows `[sign_on]`."""

CLUSTER = "[cluster]\nconfirmation_window = 2\n" + "".join(
    f'[[servers]]\nname = "gpu-{number}"\naddress = "gpu-{number}.example.org"\ngpus = 4\ncpus = 16\n'
    for number in range(4)
)

SIGN_ON = """
[sign_on]
issuer = "https://login.example.org/lab"
client_id = "gpu-manager"

[sign_on.groups.gpu-users]
role = "user"
"""

WINDOW = ("--from", "2126-12-01T08:00Z", "--until", "2126-12-01T12:00Z")


class Version:
    """An installed version, whose programs run on one store."""

    def __init__(self, python: Path, packages: Path, folder: Path, store: str) -> None:
        self.python, self.packages, self.folder = python, packages, folder
        self.store = store
        known = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER_")}
        self.environment = {
            **known,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "GPU_MANAGER_STORE": store,
            "GPU_MANAGER_SERVER": "gpu-0",
            "GPU_MANAGER_JOBS_DIR": str(folder / "jobs"),
        }

    def moved(self) -> Version:
        """Return the version on a place of its own beside the store."""
        return Version(self.python, self.packages, self.folder, f"{self.store}-moved")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.python), "-m", "resource_manager.cli", *arguments],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def command(self, *arguments: str) -> str:
        process = self.start(*arguments)
        said, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        return said

    def shown(self, *arguments: str) -> Any:
        return json.loads(self.command(*arguments, "--json"))

    @contextmanager
    def manager(self) -> Iterator[Build]:
        with running(self.packages, self.store, str(self.python)) as build:
            yield build

    @contextmanager
    def service(self) -> Iterator[httpx.Client]:
        """Serve until the block ends, then stop as an operator does; yield a client of it."""
        [port] = free_ports(1)
        process = self.start("serve", "--port", str(port))
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

                def is_ready() -> bool:
                    assert process.poll() is None, process.communicate()[1]
                    try:
                        return client.get("/readyz").status_code == 200
                    except httpx.TransportError:
                        return False

                wait_for(is_ready, 60)
                yield client
        finally:
            process.terminate()
            error = process.communicate(timeout=60)[1]
        assert process.returncode == 0, error


class HandRun:
    """A command of `gpu-manager run` on all of gpu-0, which ends when the test says so."""

    def __init__(self, version: Version, name: str) -> None:
        self.ends = version.folder / f"end-{name}"
        self.begun = version.folder / f"begun-{name}"
        script = f"echo $GPU_LEASE_ID > {self.begun}; until test -e {self.ends}; do sleep 0.1; done"
        self.process = version.start("run", "--gpus", "4", "--server", "gpu-0", "--", "sh", "-c", script)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_until_begun(self) -> None:
        wait_for(self._is_begun, 60)

    def _is_begun(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        return self.begun.exists()

    def end(self) -> None:
        """Let the command end by itself, and see the program do so."""
        self.ends.touch()
        said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said


@pytest.fixture(scope="module", params=OLDER)
def older_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment in which the older commit is installed, with what it pinned."""
    archive = subprocess.run(
        ["git", "archive", request.param], cwd=REPOSITORY, capture_output=True, check=False
    )
    if archive.returncode:
        git = ["git", "rev-parse", "--is-shallow-repository"]
        is_whole = subprocess.run(git, cwd=REPOSITORY, capture_output=True, check=False).stdout == b"false\n"
        assert not is_whole, archive.stderr
        pytest.skip(f"{request.param} is not there: needs a clone with the whole history")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as content:
        content.extractall(folder / "tree", filter="data")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pinned = ["--constraint", str(folder / "tree" / "requirements" / "dev.lock")]
    what = f"{folder / 'tree'}[api,redis,sql]"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, *pinned, what], check=True)
    return python


@pytest.fixture(params=["system_redis", "postgresql"])
def store(request: pytest.FixtureRequest) -> str:
    """URL of an empty store."""
    return str(request.getfixturevalue(request.param).fresh_url())


@pytest.fixture
def older(older_python: Path, store: str, tmp_path: Path) -> Version:
    [packages] = older_python.parents[1].glob("lib/python*/site-packages")
    return Version(older_python, packages, tmp_path, store)


@pytest.fixture
def newer(store: str, tmp_path: Path) -> Version:
    """What this checkout is."""
    return Version(Path(sys.executable), REPOSITORY, tmp_path, store)


def state(manager: Build) -> dict[str, Any]:
    """Return who holds and waits for what, but for what a renewal moves and what is put into words."""
    moving = {"expires_at", "reason", "estimated_start", "waited_s"}
    return {
        f"{name} {each['task_id']}": {key: value for key, value in each.items() if key not in moving}
        for name in ("leases", "queue")
        for each in manager.call(name)
    }


def seen_alike(older: dict[str, Any], newer: dict[str, Any]) -> bool:
    """Return whether both versions name the same entries, and each one with all that the older one says."""
    return older.keys() == newer.keys() and all(_says(newer[name], older[name]) for name in older)


def _says(answer: Any, known: Any) -> bool:
    """Return whether an answer is a known one, at most with keys of dicts that were not known."""
    if isinstance(answer, dict) and isinstance(known, dict):
        return all(key in answer and _says(answer[key], value) for key, value in known.items())
    if isinstance(answer, list) and isinstance(known, list):
        return len(answer) == len(known) and all(map(_says, answer, known))
    return bool(answer == known)


def by_token(lease: dict[str, Any]) -> dict[str, Any]:
    return {"fencing_token": lease["fencing_token"]}


def windows(version: Version) -> list[tuple[str, ...]]:
    return [(*each["servers"], each["from"], each["until"]) for each in version.shown("maintenance", "list")]


def wait_until_renewed(manager: Build, server: str) -> None:
    """Wait until the owner of the lease on that server renews it by itself."""

    def expires_at() -> float:
        [found] = [each["expires_at"] for each in manager.call("leases") if each["server_name"] == server]
        return float(found)

    before = expires_at()
    wait_for(lambda: expires_at() > before, 60)


def test_forward_and_back_while_jobs_run(older: Version, newer: Version, tmp_path: Path) -> None:
    cluster, with_sign_on, file = (tmp_path / name for name in ("cluster.toml", "sign-on.toml", "state.json"))
    cluster.write_text(CLUSTER)
    with_sign_on.write_text(SIGN_ON)
    with ExitStack() as stack:
        # Older: a job that runs, one that waits for its GPUs, a gang, a pending request, a window.
        older.command("apply", "--yes", str(cluster))
        older.command("maintenance", "add", "gpu-3", *WINDOW)
        old = stack.enter_context(older.manager())
        first = stack.enter_context(HandRun(older, "first"))
        first.wait_until_begun()
        second = stack.enter_context(HandRun(older, "second"))
        wait_for(lambda: len(old.call("queue")) == 1)
        gang = old.call("submit", "gang", 4, 1, nodes=2)
        assert [member["server_name"] for member in gang["members"]] == ["gpu-1", "gpu-2"]
        held = by_token(old.call("submit", "held", 2, 1, server="gpu-3"))
        assert old.call("submit", "pending", 4, 1, server="gpu-1")["state"] == "WAITING"

        # Forward: the newer version beside it sees the same, and each goes on with what the other began.
        new = stack.enter_context(newer.manager())
        with older.service() as served:
            assert seen_alike(state(old), state(new))
            assert windows(newer) == windows(older)
            mine = by_token(new.call("submit", "mine", 2, 1, server="gpu-3"))
            assert old.call("renew", "mine", **mine)["state"] == "RUNNING"
            assert served.post("/api/renew", json={"task_id": "mine", **mine}).status_code == 200
            wait_until_renewed(new, "gpu-0")
            assert new.call("release_resources", "gang", **by_token(gang))
            assert old.call("status_of", "pending")["server_name"] == "gpu-1"
            first.end()
            second.wait_until_begun()
            assert seen_alike(state(old), state(new))
            assert windows(newer) == windows(older)

        # The service is replaced by the newer one and back, with nothing else to do, and forward again.
        with newer.service() as served:
            assert served.post("/api/renew", json={"task_id": "held", **held}).status_code == 200
        with older.service() as served:
            assert served.post("/api/renew", json={"task_id": "held", **held}).status_code == 200

        # Something new is used: older processes grant nothing, but renew and release what they hold.
        with newer.service():
            newer.command("apply", "--yes", str(with_sign_on))
            assert "does not know 'sign_on'" in old.refusal("submit", "more", 2, 1)
            wait_until_renewed(new, "gpu-0")
            second.end()
            assert "gpu-0" not in {lease["server_name"] for lease in new.call("leases")}
            assert old.call("renew", "mine", **mine)["state"] == "RUNNING"
            assert old.call("release_resources", "held", **held)

        # Back: what is new is taken out, and its history is left behind with the place of the state.
        assert not {"expired", "quarantined"} & {change["change"] for change in new.call("history")}
        newer.command("apply", "--yes", "--remove", "sign_on", str(cluster))
        left, windows_left = state(new), windows(newer)
        older_there = older.moved()
        newer.command("store", "backup", "--final", "--to", older_there.store, str(file))
        newer.moved().command("store", "restore", str(file))
        with older_there.manager() as again, older_there.service() as served:
            assert seen_alike(state(again), left)
            assert windows(older_there) == windows_left
            assert served.post("/api/renew", json={"task_id": "mine", **mine}).status_code == 200
            again.call("submit", "more", 2, 1, server="gpu-3")
            wait_for(lambda: again.call("status_of", "more")["state"] == "RUNNING", 60)
            for name in ("more", "mine", "pending"):
                assert again.call("release_resources", name)
            assert state(again) == {}
