"""Rules of a cluster whose policy, of another package, fails: leases end all the same, and all say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from resource_manager import GPUResourceManager, Refusal, Settings
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.storage import MemoryStore
from tests import package_policies
from tests.builders import nodes


@pytest.mark.parametrize("name", ["raises", "twice", "unknown", "pair"])
def test_under_a_policy_that_fails_leases_end_and_all_say_why(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_policies.install(tmp_path, monkeypatch)
    store = MemoryStore()
    manager = GPUResourceManager(Settings(store="redis://unused"), store=store, inventory=nodes("a"))
    manager.submit("held", 2)
    manager.submit("waits", 2)
    manager.apply(ClusterForm.model_validate({"cluster": {"policy": name}}))
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
    other = GPUResourceManager(Settings(store="redis://unused"), store=store)
    assert [entry["task_id"] for entry in other.queue()] == ["y"]
    other.apply(ClusterForm.model_validate({"cluster": {"policy": "first_fit"}}))
    assert [lease["task_id"] for lease in manager.leases()] == ["y"]
    assert "misconfigured" not in manager.get_resource_summary()
