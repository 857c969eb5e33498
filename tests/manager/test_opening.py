"""Opening a store changes nothing, whatever the process is told; an empty store grants nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import InvalidRequestError, NoServersError, ResourceManagerError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.opening import StatedCluster
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.scheduling.placement import policies
from resource_manager.storage import open_store
from resource_manager.storage.base import Store
from tests import package_policies
from tests.builders import granted_lease, nodes
from tests.redis_server import RedisServer

FILES = {
    "servers.toml": '[[servers]]\nname = "a"\ncpus = 4\n',
    "other.toml": '[cluster]\norder = "fifo"\n[[servers]]\nname = "z"\ncpus = 64\n',
    "wrong.toml": "[[servers]\n",
}
ENVIRONMENT = {
    "GPU_MANAGER_INVENTORY": (*FILES, "missing.toml"),
    "GPU_MANAGER_POLICY": ("best_fit", "magic"),
    "GPU_MANAGER_ORDER": ("fifo", "magic"),
    "GPU_MANAGER_MAX_GPUS": ("1", "x"),
    "GPU_MANAGER_LEASE_TTL_S": ("1",),
    "GPU_MANAGER_LEASE_CONFIRMATION_WINDOW_S": ("0",),
    "GPU_MANAGER_HEALTH": ("wrong.toml",),
    "GPU_MANAGER_INSTANCE": ("here", "there"),
    "GPU_MANAGER_CACHE_TTL_S": ("0", "60"),
}


def draw_environment(draw: random.Random, folder: Path) -> dict[str, str]:
    found = {name: draw.choice(values) for name, values in ENVIRONMENT.items() if draw.random() < 0.5}
    if "GPU_MANAGER_INVENTORY" in found:
        found["GPU_MANAGER_INVENTORY"] = str(folder / found["GPU_MANAGER_INVENTORY"])
    return found


def whole(store: Store) -> object:
    cluster = store.refresh(None)
    return None if cluster is None else cluster.snapshot()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.thorough
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), is_empty=st.booleans(), kind=st.sampled_from(("sqlite", "redis")))
def test_no_interleaving_of_openings_changes_anything(
    folder: Path,
    embedded_redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    is_empty: bool,
    kind: str,
) -> None:
    draw = random.Random(seed)
    url = (
        embedded_redis.fresh_url()
        if kind == "redis"
        else f"sqlite:///{tmp_path_factory.mktemp('s')}/state.db"
    )
    if not is_empty:
        with GPUResourceManager.from_url(url, inventory=nodes("ab"), order="srtf") as first:
            first.adopt("a", [*nodes("a", gpus=3)[0].gpus])
            first.drain("b")
    store = open_store(url, Settings(store=url))
    before = whole(store)
    opened: list[GPUResourceManager] = []
    for _ in range(draw.randint(1, 5)):
        environment = {**draw_environment(draw, folder), "GPU_MANAGER_STORE": url}
        manager = GPUResourceManager(Settings.load(environment))
        opened.append(manager)
        look = draw.choice((manager.get_resource_summary, manager.leases, manager.cluster, manager.queue))
        look()
        if draw.random() < 0.3:
            opened.pop(draw.randrange(len(opened))).close()
        assert whole(store) == before
    for manager in opened:
        manager.expire_and_schedule()
        manager.close()
    assert whole(store) == before
    store.close()


@pytest.mark.thorough
def test_processes_that_name_different_files_share_one_cluster(folder: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    with GPUResourceManager.from_url(url, inventory=folder / "servers.toml") as manager:
        before = manager.snapshot()
        command = [sys.executable, "-m", "resource_manager.cli", "status", "--json"]
        running = [
            subprocess.Popen(
                command,
                env={**os.environ, "GPU_MANAGER_STORE": url, "GPU_MANAGER_INVENTORY": str(folder / name)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("servers.toml", "other.toml")
        ]
        said = [process.communicate(timeout=60)[0] for process in running]
        assert said[0] == said[1]
        assert manager.snapshot() == before


# ---- a store without a cluster ----


@pytest.fixture
def empty() -> GPUResourceManager:
    return GPUResourceManager(Settings(store="redis://unused"), store=MemoryStore())


def test_a_store_without_a_cluster_grants_nothing_and_says_what_to_do(empty: GPUResourceManager) -> None:
    said = "misconfigured: no servers yet: gpu-manager apply FILE"
    refusal = empty.allocate("x", 1)
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, refusal.detail) == (RefusalKind.MISCONFIGURED, said)
    assert empty.allocate_resources("x", 2, 4) is None
    with pytest.raises(NoServersError, match="no servers yet: gpu-manager apply FILE"):
        empty.submit("x", 1)
    summary = empty.get_resource_summary()
    assert (summary["servers"], summary["misconfigured"]) == ([], said)
    assert whole(empty.store) is None


def test_it_grants_as_soon_as_a_cluster_is_applied(empty: GPUResourceManager) -> None:
    other = GPUResourceManager(Settings(store="redis://unused"), store=empty.store)
    assert isinstance(other.allocate("x", 1), Refusal)
    empty.apply(ClusterForm.model_validate({"servers": [{"name": "a", "gpus": 1, "cpus": 4}]}))
    assert not isinstance(other.allocate("x", 1), Refusal)


# ---- a process that lacks what is stored ----


def test_a_process_without_the_policy_renews_and_releases_and_grants_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(policies.POLICIES, "ours", policies.get_policy("first_fit"))
    with_it = GPUResourceManager(
        Settings(store="redis://unused"),
        store=MemoryStore(),
        inventory=nodes("ab"),
        cluster={"policy": "ours"},
    )
    with_it.allocate("held", 2)
    with_it.submit("waits", 2, server="a")
    monkeypatch.delitem(policies.POLICIES, "ours")
    without = GPUResourceManager(Settings(store="redis://unused"), store=with_it.store)
    refusal = without.allocate("x", 1)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.MISCONFIGURED
    assert refusal.detail.startswith("misconfigured: unknown policy 'ours'")
    assert f"process {os.getpid()} on " in refusal.detail
    assert without.get_resource_summary()["misconfigured"] == refusal.detail
    assert without.explain("y", 1)["kind"] == "misconfigured"
    assert without.renew("held")["task_id"] == "held"
    assert without.release("held").value == "released"
    status = without.status_of("waits")
    assert status is not None
    assert status["state"] == "WAITING"
    with pytest.raises(InvalidRequestError, match="policy ours: unknown policy 'ours'"):
        without.apply(ClusterForm.model_validate({"cluster": {"policy": "ours", "order": "fifo"}}))
    monkeypatch.setitem(policies.POLICIES, "ours", policies.get_policy("first_fit"))
    with_it.expire_and_schedule()
    assert [lease["task_id"] for lease in with_it.leases()] == ["waits"]


def test_a_process_may_not_open_with_what_is_not_installed() -> None:
    with pytest.raises(ResourceManagerError, match="unknown policy 'magic'"):
        GPUResourceManager.from_url("memory://", policy="magic")


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_state_that_begins_anew_issues_no_fencing_token_of_one_that_was_lost(
    is_applied: bool, tmp_path: Path
) -> None:
    tokens: list[int] = []
    for name in ("lost", "new"):
        inventory = None if is_applied else nodes("a")
        with GPUResourceManager.from_url(f"sqlite:///{tmp_path / name}", inventory=inventory) as manager:
            if is_applied:
                manager.apply(ClusterForm.model_validate({"servers": [{"name": "a", "gpus": 8, "cpus": 64}]}))
            tokens.append(granted_lease(manager.submit("job", 2))["fencing_token"])
    assert tokens[0] < tokens[1]


def test_a_reset_of_a_state_that_nobody_can_read_keeps_the_package_of_the_policy_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes the cluster given to the manager, as an empty store's."""
    package_policies.install(tmp_path, monkeypatch)
    stated = StatedCluster(nodes("a"), {"policy": "at_most_two"})
    assert stated.snapshot().settings.policy_package == "our-policies"
