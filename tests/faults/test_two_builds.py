"""Two builds of the package at once on one store, in processes of their own, while jobs hold leases."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import resource_manager
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.manager import GPUResourceManager
from tests.builders import granted_lease
from tests.faults.older_build import older_build

CALLS = """\
import json, sys
sys.path.insert(0, sys.argv[1])
import resource_manager
assert resource_manager.__file__.startswith(sys.argv[1]), resource_manager.__file__
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.cluster_file.servers import default_inventory
manager = GPUResourceManager.from_url(sys.argv[2])
for line in sys.stdin:
    name, args, more = json.loads(line)
    try:
        print(json.dumps({"answer": getattr(manager, name)(*args, **more)}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
"""
"""Program that calls the manager of the build in its first argument, as told on its standard input."""

WINDOW = {"from": "2126-12-01T08:00Z", "until": "2126-12-01T12:00Z"}


class Build:
    """The manager of another build, in a process of its own."""

    def __init__(self, folder: Path, url: str, python: str = sys.executable) -> None:
        self.process = subprocess.Popen(
            [python, "-c", CALLS, str(folder), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )

    def answer(self, name: str, *args: Any, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, args, more]) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def call(self, name: str, *args: Any, **more: Any) -> Any:
        found = self.answer(name, *args, **more)
        assert "answer" in found, found
        return found["answer"]

    def refusal(self, name: str, *args: Any, **more: Any) -> str:
        return str(self.answer(name, *args, **more)["error"])


@contextmanager
def running(folder: Path, url: str, python: str = sys.executable) -> Iterator[Build]:
    build = Build(folder, url, python)
    try:
        yield build
    finally:
        build.process.kill()
        build.process.communicate()


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Folder of the older build."""
    return older_build(tmp_path)


@pytest.fixture(params=["embedded_redis", pytest.param("postgresql", marks=pytest.mark.e2e), "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    """URL of an empty store."""
    return str(request.getfixturevalue(request.param).fresh_url())


@pytest.mark.slow
def test_known_changes_go_on_between_two_builds_and_an_unknown_one_grants_nothing(
    older: Path, url: str
) -> None:
    with running(older, url) as old, GPUResourceManager.from_url(url, inventory=default_inventory()) as new:
        # What both know goes on, whoever wrote it.
        first = old.call("allocate_resources", "of old", 8, 8)
        second = new.allocate_resources("of new", 8, 8)
        assert second is not None
        assert new.renew("of old", fencing_token=first["fencing_token"])["state"] == "RUNNING"
        assert old.call("renew", "of new", fencing_token=second["fencing_token"])["state"] == "RUNNING"
        assert old.call("submit", "third", 8, 8)["state"] == "RUNNING"
        assert [lease["task_id"] for lease in old.call("leases")] == ["of old", "of new", "third"]

        # What only the newer one knows stops the older one: it grants, shows and expires nothing.
        new.add_maintenance(WindowForm.of(servers=["gpu-server-3"], **WINDOW))
        new.submit("waits", 8, 8, server=2, expected_runtime=60)
        before = new.history()
        for name, *args in (
            ("allocate_resources", "x", 2, 2),
            ("submit", "x", 2, 2),
            ("cancel", "waits"),
            ("drain", 0),
            ("renew", "of old"),
            ("release_resources", "of old"),
            ("expire_and_schedule",),
            ("leases",),
        ):
            words = old.refusal(name, *args)
            assert words.startswith("NewerFormatError: "), words
            assert "'maintenancechanged': upgrade it" in words
            assert "\n" not in words
        with running(older, url) as newcomer:
            assert "upgrade it" in newcomer.refusal("allocate_resources", "x", 2, 2)
        assert new.history() == before

        # Jobs that run go on: by id and fencing token their leases are renewed and released.
        kept = old.call("renew", "of old", fencing_token=first["fencing_token"])
        assert (kept["state"], kept["gpu_ids"]) == ("RUNNING", first["gpu_ids"])
        assert kept["expires_at"] >= first["expires_at"]
        assert "no live lease" in old.refusal("renew", "of old", fencing_token=99)
        assert old.call("release_resources", "third", fencing_token=99) is False
        third = granted_lease(new.named("third"))["fencing_token"]
        with running(older, url) as newcomer:
            assert newcomer.call("release_resources", "third", fencing_token=third)
        made = [change["change"] for change in new.history(before[-1]["version"])]
        assert made == ["renewed", "released"], "and nothing was granted for it"
        assert new.queue()[0]["task_id"] == "waits"
        assert [lease["task_id"] for lease in new.leases()] == ["of old", "of new"]

        # The newer one goes on with all of it, and grants nothing that a job still holds.
        taken = new.submit("fourth", 8, 8, expected_runtime=60)
        held = {lease["server_name"] for lease in (first, second)}
        assert taken["state"] == "RUNNING"
        assert taken["server_name"] not in held

        # A job that was preempted keeps its place in the queue, also when the older one ends its lease.
        new.submit("urgent", 8, 8, server=second["server_name"], priority=9, expected_runtime=60)
        new.preempt("of new", preemptor="urgent")
        token = second["fencing_token"]
        assert old.call("release_resources", "of new", fencing_token=token, outcome="PREEMPTED")
        assert "of new" in [entry["task_id"] for entry in new.queue()]

    # Upgraded, the owner of the first lease finds it as it was.
    with running(Path(resource_manager.__file__).parents[1], url) as upgraded:
        again = upgraded.call("renew", "of old", fencing_token=first["fencing_token"])
        assert (again["server_name"], again["gpu_ids"]) == (first["server_name"], first["gpu_ids"])
        assert upgraded.call("release_resources", "of old", fencing_token=first["fencing_token"])
