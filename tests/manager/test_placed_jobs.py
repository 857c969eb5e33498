"""Leases whose jobs were placed: only who knows that the job is gone frees their GPUs, by every way in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager, Settings
from resource_manager.cli import main
from resource_manager.core.changes import JobEnd
from resource_manager.core.models import Gpu, JobPlace, Node
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import (
    DuplicateTaskError,
    InvalidRequestError,
    JobPlacedError,
    LeaseNotFoundError,
)
from resource_manager.manager.results import ReleaseResult
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.tokens import Role, create
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock, granted_lease, json_of, present
from tests.cli.targets import holding
from tests.listening import client_of

PLACE = JobPlace("ssh", "gpu-a:22", "gpu_ssh", "0123 gpu-a", "/home/ada/.gpu-manager/jobs", "f00d", "ada")
NODES = [
    Node(name, number, {"cpus": 8}, tuple(map(Gpu, range(2))), f"10.0.0.{number}")
    for number, name in enumerate("ab")
]


@pytest.fixture
def manager(clock: Clock) -> Iterator[GPUResourceManager]:
    settings = Settings(store="memory://")
    with GPUResourceManager(settings, store=MemoryStore(clock=clock), inventory=NODES) as manager:
        yield manager


@pytest.fixture
def client(manager: GPUResourceManager, tmp_path: Path) -> Iterator[ServiceClient]:
    with client_of(manager, tmp_path) as client:
        yield client


@pytest.fixture(params=["manager", "client"])
def way(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def command(manager: GPUResourceManager, *words: str) -> Any:
    return CliRunner().invoke(main, list(words), obj=holding(manager))


def placed(manager: GPUResourceManager, task_id: str = "t", ttl: float = 60) -> int:
    """Return the fencing token of a lease of all GPUs of a server, whose job was placed."""
    token = granted_lease(manager.submit(task_id, 2, owner="ada", ttl=ttl))["fencing_token"]
    manager.place_job(task_id, [PLACE], fencing_token=token)
    return int(token)


def free_gpus(manager: GPUResourceManager) -> int:
    return sum(int(row["available_gpus"]) for row in manager.get_resource_summary()["servers"])


def test_a_lease_says_where_its_job_is(way: Any) -> None:
    token = way.submit("t", 2)["fencing_token"]
    assert way.status_of("t")["job_places"] == []
    found = way.place_job("t", [PLACE], fencing_token=token)
    assert [JobPlace(**place) for place in found["job_places"]] == [PLACE]
    assert way.status_of("t")["job_places"] == found["job_places"]


def test_the_first_to_place_the_job_is_the_one_that_starts_it(way: Any) -> None:
    token = way.submit("t", 2)["fencing_token"]
    way.place_job("t", [PLACE], fencing_token=token)
    found = way.place_job("t", [JobPlace("local", machine="other")], fencing_token=token)
    assert [JobPlace(**place) for place in found["job_places"]] == [PLACE]


def test_a_job_is_placed_only_under_the_lease_that_lives(way: Any) -> None:
    token = way.submit("t", 2)["fencing_token"]
    way.release_resources("t")
    with pytest.raises(LeaseNotFoundError):
        way.place_job("t", [PLACE], fencing_token=token)
    again = way.submit("t", 2)["fencing_token"]
    with pytest.raises(InvalidRequestError, match="places must have one entry for each member, 1, got 2"):
        way.place_job("t", [PLACE, PLACE], fencing_token=again)


@pytest.mark.parametrize("launcher", ["local", "terminal", "ssh", "slurm"])
def test_a_folder_is_stored_only_with_its_machine(way: Any, launcher: str) -> None:
    """Whoever ends the job would look into a folder of that name wherever they are."""
    token = way.submit("t", 2)["fencing_token"]
    with pytest.raises(InvalidRequestError, match="places must state the machine of each folder"):
        way.place_job("t", [JobPlace(launcher, "gpu-a", folder="/tmp/evil")], fencing_token=token)
    assert way.status_of("t")["job_places"] == []


def test_a_lease_without_a_placed_job_ends_with_its_ttl(manager: GPUResourceManager, clock: Clock) -> None:
    manager.submit("t", 2, ttl=60)
    clock.now += 61
    manager.expire_and_schedule()
    assert free_gpus(manager) == 4


def test_a_lease_with_a_placed_job_is_quarantined_at_its_ttl_for_a_reason(
    manager: GPUResourceManager, clock: Clock
) -> None:
    placed(manager)
    clock.now += 61
    manager.expire_and_schedule()
    lease = manager.status_of("t")
    assert lease is not None
    assert lease["state"] == "ERROR"
    assert lease["reason"] == (
        "t vnpm of ada was not renewed, and its job on a (ssh, user ada) may still run: stop it, or release "
        "it with --gone once it is known to be gone"
    )
    assert free_gpus(manager) == 2
    manager.renew("t", fencing_token=lease["fencing_token"])
    lease = manager.status_of("t")
    assert lease is not None
    assert (lease["state"], lease["reason"]) == ("RUNNING", "")


def test_a_lease_held_beyond_its_preemption_without_a_placed_job_ends_as_its_reason_says(
    manager: GPUResourceManager, clock: Clock
) -> None:
    """It said "release it with --gone", which only operators may, and named a job that nobody had placed."""
    manager.submit("t", 2, owner="ada", preemptible=True, server="a")
    manager.submit("urgent", 2, priority=9, server="a")
    manager.preempt("t")
    until = present(granted_lease(manager.status_of("t"))["until"])
    manager.renew("t", for_s=86400)
    clock.now = until + 1
    manager.expire_and_schedule()
    lease = present(manager.status_of("t"))
    assert (lease["state"], lease["reason"]) == (
        "ERROR",
        "t vnpm of ada is held beyond its preemption, and its process on a may still run: end that, or wait "
        "until nobody renews the lease",
    )
    clock.now += 86400
    manager.expire_and_schedule()
    assert [lease["task_id"] for lease in manager.leases()] == ["urgent"]


def test_a_release_without_knowledge_of_the_job_is_refused_and_says_stop(
    way: Any, manager: GPUResourceManager
) -> None:
    token = placed(manager)
    for release in (way.release, way.release_resources):
        with pytest.raises(
            JobPlacedError, match=r"^t vnpm has a job on a \(launcher ssh\), .*: stop it instead$"
        ):
            release("t", fencing_token=token)
    assert free_gpus(manager) == 2


def test_who_saw_the_end_of_the_job_releases_it(way: Any, manager: GPUResourceManager) -> None:
    token = placed(manager)
    assert way.release("t", fencing_token=token, job_end=JobEnd.ENDED) is ReleaseResult.RELEASED
    assert free_gpus(manager) == 4


def test_an_operator_s_word_frees_the_gpus_and_stays_in_the_history(
    way: Any, manager: GPUResourceManager
) -> None:
    placed(manager)
    with pytest.raises(InvalidRequestError, match="reason must say how the job is known to be gone"):
        way.release("t", job_end="gone")
    assert way.release("t", job_end="gone", reason="RMA of a") is ReleaseResult.RELEASED
    assert manager.history()[-1]["reason"] == "RMA of a"


def test_a_release_by_force_quarantines_and_nobody_renews_it(way: Any, manager: GPUResourceManager) -> None:
    token = placed(manager)
    for _ in range(2):
        assert way.release("t", job_end="forced") is ReleaseResult.QUARANTINED
    lease = way.status_of("t")
    assert (lease["state"], lease["revoked"], free_gpus(manager)) == ("ERROR", True, 2)
    with pytest.raises(LeaseNotFoundError):
        way.renew("t", fencing_token=token)
    assert way.release("t", fencing_token=token, job_end="ended") is ReleaseResult.RELEASED
    assert free_gpus(manager) == 4


def test_no_request_is_answered_by_a_lease_that_was_released_by_force(way: Any) -> None:
    token = way.submit("t", 2)["fencing_token"]
    way.place_job("t", [PLACE], fencing_token=token)
    way.release("t", job_end="forced")
    for ask in (way.submit, way.try_allocate, way.allocate_resources):
        with pytest.raises(DuplicateTaskError, match="whose job may still run: release it once none does"):
            ask("t", 2, 1)
    [refused] = way.try_allocate_batch([{"lease_id": "t", "gpus": 2}])
    assert refused.kind is RefusalKind.TASK_TAKEN
    way.release("t", fencing_token=token, job_end="ended")
    assert way.submit("t", 2)["fencing_token"] > token


def test_a_release_by_force_of_a_lease_without_a_job_is_a_release(way: Any) -> None:
    way.submit("t", 2)
    assert way.release("t", job_end="forced") is ReleaseResult.RELEASED


def test_an_unknown_job_end_is_refused(way: Any) -> None:
    way.submit("t", 2)
    with pytest.raises(InvalidRequestError, match="job_end"):
        way.release("t", job_end="perhaps")


def test_members_of_a_gang_with_a_job_end_only_with_its_end(way: Any, manager: GPUResourceManager) -> None:
    token = granted_lease(manager.submit("g", 2, nodes=2))["fencing_token"]
    manager.place_job("g", [PLACE, PLACE], fencing_token=token)
    with pytest.raises(JobPlacedError):
        way.release_members("g", [0], fencing_token=token)
    assert way.release_members("g", [0], fencing_token=token, job_end="ended") is ReleaseResult.RELEASED
    (rest,) = manager.leases()
    assert len(rest["job_places"]) == 1
    with pytest.raises(JobPlacedError):
        way.release("g", fencing_token=token)
    assert way.release("g", fencing_token=token, job_end="gone", reason="seen") is ReleaseResult.RELEASED


def test_an_operator_s_word_about_members_of_a_gang_is_in_the_history(
    way: Any, manager: GPUResourceManager
) -> None:
    token = granted_lease(manager.submit("g", 2, nodes=2))["fencing_token"]
    manager.place_job("g", [PLACE, PLACE], fencing_token=token)
    with pytest.raises(InvalidRequestError, match="reason"):
        way.release_members("g", [0], fencing_token=token, job_end="gone")
    way.release_members("g", [0], fencing_token=token, job_end="gone", reason="its server burnt")
    way.release("g", fencing_token=token, job_end="gone", reason="rebooted")
    assert [change["reason"] for change in manager.history()[-2:]] == ["its server burnt", "rebooted"]


def test_the_command_line_believes_an_operator_about_a_member_of_a_gang(manager: GPUResourceManager) -> None:
    token = granted_lease(manager.submit("g", 2, nodes=2))["fencing_token"]
    manager.place_job("g", [PLACE, PLACE], fencing_token=token)
    words = ["release", "g", "--fencing-token", str(token), "--gone", "--reason", "its server burnt"]
    assert command(manager, *words, "--rank", "0").exit_code == 0
    assert [lease["state"] for lease in manager.leases()] == ["ERROR"]
    assert command(manager, *words, "--rank", "1").exit_code == 0
    assert manager.leases() == []


def test_the_command_line_refuses_forces_and_believes_an_operator(manager: GPUResourceManager) -> None:
    placed(manager)
    refused = command(manager, "release", "t")
    assert refused.exit_code == 1
    assert refused.output == (
        "Error: t vnpm has a job on a (launcher ssh), whose GPUs must not be granted while it runs: "
        "stop it instead\n"
    )
    assert command(manager, "release", "t", "--gone").exit_code == 2
    assert command(manager, "release", "t", "--gone", "--reason", "x", "--force").exit_code == 2
    assert command(manager, "release", "t", "--force").output == "t vnpm: quarantined\n"
    assert command(manager, "release", "t", "--gone", "--reason", "rebooted").output == "t vnpm: released\n"
    assert manager.leases() == []


def test_only_an_operator_s_word_counts(manager: GPUResourceManager, tmp_path: Path) -> None:
    persistence = persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")
    service = standalone(manager, persistence)
    app = create_app(service).test_client()
    header = {"Authorization": f"Bearer {create(persistence.tokens, 'ada', Role.USER)}"}
    placed(manager)
    body = {"task_id": "t", "job_end": "gone", "reason": "I think so"}
    answer = app.post("/api/release", json=body, headers=header)
    assert (answer.status_code, json_of(answer)["detail"]) == (
        403,
        "job_end gone is an operator's word that nothing runs there any more",
    )
    answer = app.post("/api/release", json={"task_id": "t"}, headers=header)
    assert (answer.status_code, json_of(answer)["type"]) == (409, "urn:gpu-manager:job-placed")
    answer = app.post("/api/release", json={**body, "job_end": "ended"}, headers=header)
    assert answer.json == {"success": True, "task_id": "t", "quarantined": False}
    service.watch.close()
