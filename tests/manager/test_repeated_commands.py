"""Commands repeated under their key on real stores: they answer what they did, whatever others did since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, JobPlace, Lease
from resource_manager.errors import LeaseNotFoundError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.results import ReleaseResult
from resource_manager.storage.once import Once

TEAMS = {"vision": {"guaranteed": 4}, "nlp": {"limit": 8}}
PLACE = JobPlace("local", machine="gpu-a", folder="/jobs", mark="7")


@pytest.fixture(params=["embedded_redis", "postgresql", "sqlite"])
def manager(request: pytest.FixtureRequest) -> Iterator[GPUResourceManager]:
    url = request.getfixturevalue(request.param).fresh_url()
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        yield manager


def once() -> Once:
    return Once("ada", "k", "f")


def applied(**sections: Any) -> Callable[[GPUResourceManager, Once | None], Any]:
    return lambda manager, key: manager.apply(ClusterForm.model_validate(sections), once=key)


def window(manager: GPUResourceManager) -> int:
    form = WindowForm.of(
        servers=["gpu-server-3"], **{"from": "2126-12-01T08:00Z", "until": "2126-12-01T12:00Z"}
    )
    return manager.add_maintenance(form)["id"]


@pytest.mark.parametrize(
    ("command", "undo"),
    [
        (applied(teams=TEAMS), applied(teams={"nlp": {"limit": 1}})),
        (applied(cluster={"order": "fifo"}), applied(cluster={"order": "priority"})),
        (
            applied(servers=[{"name": "new", "gpus": 2, "cpus": 4}]),
            applied(servers=[{"name": "other", "gpus": 1, "cpus": 4}]),
        ),
        (lambda m, key: m.drain(1, reason="RMA", once=key), lambda m, key: m.resume(1)),
        (lambda m, key: m.drain(1, 3, once=key), lambda m, key: m.resume(1, 3)),
        (lambda m, key: m.resume(2, once=key), lambda m, key: m.drain(2)),
        (lambda m, key: m.adopt(1, [Gpu(0, uuid="GPU-a")], once=key), lambda m, key: m.adopt(1, [Gpu(0)])),
        (lambda m, key: m.remove_maintenance(m.window, once=key), lambda m, key: window(m)),
    ],
    ids=["teams", "settings", "servers", "drain", "drain a GPU", "resume", "adopt", "remove a window"],
)
def test_a_repeated_command_answers_as_the_first_time(
    manager: GPUResourceManager, command: Callable[..., Any], undo: Callable[..., Any]
) -> None:
    manager.window = window(manager)  # type: ignore[attr-defined]
    first = command(manager, once())
    undo(manager, None)
    version = manager.get_resource_summary()["version"]
    again = once()
    assert command(manager, again) == first
    assert again.repeated
    assert manager.get_resource_summary()["version"] == version, "nothing is done again"


def test_a_repeated_release_tells_whether_the_lease_ended_or_was_quarantined(
    manager: GPUResourceManager,
) -> None:
    lease = manager.allocate("t", 2, server=0)
    assert isinstance(lease, Lease)
    manager.place_job("t", [PLACE], fencing_token=lease.fencing_token)
    for _ in range(2):
        assert manager.release("t", job_end="forced", once=once()) is ReleaseResult.QUARANTINED
    gone = [
        manager.release("t", job_end="gone", reason="looked", once=Once("ada", "gone", "f")) for _ in range(2)
    ]
    assert gone == [ReleaseResult.RELEASED] * 2


def test_a_place_stored_again_after_the_lease_has_ended_says_so(manager: GPUResourceManager) -> None:
    lease = manager.allocate("t", 2, server=0)
    assert isinstance(lease, Lease)
    placed = manager.place_job("t", [PLACE], fencing_token=lease.fencing_token)
    assert manager.place_job("t", [PLACE], fencing_token=lease.fencing_token) == placed
    manager.release("t", job_end="ended")
    with pytest.raises(LeaseNotFoundError):
        manager.place_job("t", [PLACE], fencing_token=lease.fencing_token)


def test_an_empty_section_changes_nothing(manager: GPUResourceManager) -> None:
    applied(teams=TEAMS)(manager, None)
    version = manager.get_resource_summary()["version"]
    done = applied(teams={}, servers=[])(manager, once())
    assert (done["changed"], done["lines"]) == (False, [])
    assert manager.get_resource_summary()["version"] == version
    assert manager.cluster()["sections"]["teams"].keys() == TEAMS.keys()
