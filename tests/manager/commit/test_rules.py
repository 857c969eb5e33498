"""Rules of a cluster whose policy, of another package, fails: leases end all the same, and all say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager, Refusal, Settings
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.storage import MemoryStore
from tests import package_policies
from tests.builders import nodes

Opened = Callable[..., GPUResourceManager]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Return a function that opens a manager on one store, with the packages' policies to be had."""
    package_policies.install(tmp_path, monkeypatch)
    store = MemoryStore()

    def opened(gpus: int = 2) -> GPUResourceManager:
        return GPUResourceManager(
            Settings(store="redis://unused"), store=store, inventory=nodes("a", gpus=gpus)
        )

    return opened


def rule(manager: GPUResourceManager, **settings: str) -> None:
    manager.apply(ClusterForm.model_validate({"cluster": settings}))


@pytest.mark.parametrize("name", ["raises", "twice", "unknown", "pair"])
def test_under_a_policy_that_fails_leases_end_and_all_say_why(opened: Opened, name: str) -> None:
    manager = opened()
    manager.submit("held", 2)
    manager.submit("waits", 2)
    rule(manager, policy=name)
    assert manager.release("held").value == "released"
    (status,) = manager.queue()
    fault = f"policy {name!r} of our-policies fails for "
    assert (status["state"], status["kind"]) == ("WAITING", "misconfigured")
    assert status["reason"].startswith(f"misconfigured: {fault}'waits': ")
    assert status["reason"].endswith("; gpu-manager apply sets another policy")
    assert fault in manager.get_resource_summary()["misconfigured"]
    assert manager.cancel("waits")
    # What such a policy chooses is never stored: nobody could read the state any more.
    refusal = manager.allocate("x", 2)
    assert isinstance(refusal, Refusal)
    assert fault in refusal.detail
    manager.submit("y", 2)
    other = opened()
    assert [entry["task_id"] for entry in other.queue()] == ["y"]
    rule(other, policy="first_fit")
    assert [lease["task_id"] for lease in manager.leases()] == ["y"]
    assert "misconfigured" not in manager.get_resource_summary()


def test_only_the_requests_that_a_policy_fails_for_are_told_of_its_fault(opened: Opened) -> None:
    manager = opened(gpus=8)
    rule(manager, policy="at_most_two", order="fifo")
    assert manager.submit("narrow", 2)["state"] == "RUNNING"
    for lease_id, gpus in {"wide": 4, "behind": 1, "widest": 8}.items():
        manager.submit(lease_id, gpus)
    kinds = {entry["task_id"]: entry["kind"] for entry in manager.queue()}
    assert kinds == {"wide": "misconfigured", "behind": "behind_queue", "widest": "no_capacity"}
    assert manager.queue()[1]["reason"].startswith("6 GPUs are free on a; reserved for wide ")
    assert manager.cancel("wide")
    assert [lease["task_id"] for lease in manager.leases()] == ["narrow", "behind"]


def test_a_policy_that_chooses_no_server_is_why_a_request_that_fits_waits(opened: Opened) -> None:
    manager = opened()
    rule(manager, policy="chooses_none")
    reason = "misconfigured: the policy chooses no server for it; gpu-manager apply sets another policy"
    assert manager.submit("fits", 2)["reason"] == reason
