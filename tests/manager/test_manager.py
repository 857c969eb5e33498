"""The manager's interface: the original's cases, leases, the queue, servers and invalid use."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import pytest

from resource_manager import AsyncGPUResourceManager, GPUResourceManager, MemoryStore, Settings
from resource_manager.core.changes import Change, Granted, Renewed
from resource_manager.core.models import Lease
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import (
    DuplicateTaskError,
    InvalidRequestError,
    LeaseNotFoundError,
    LockTimeoutError,
    NeverFitsError,
    ResourceManagerError,
    StateUnconfirmedError,
    UnknownNodeError,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.refusal_wording import Refusal, lock_busy
from resource_manager.manager.server_views import summary
from resource_manager.scheduling.allocator import check
from resource_manager.storage.codec import snapshot_from_dict
from tests.builders import Clock, granted_lease, queue_entry, redefine


@pytest.fixture
def make(clock: Clock) -> Callable[..., GPUResourceManager]:
    def build(cluster: dict[str, object] | None = None, **settings: Any) -> GPUResourceManager:
        return GPUResourceManager(
            Settings(store="memory://", **settings),
            cluster=cluster,
            store=MemoryStore(clock=clock),
        )

    return build


@pytest.fixture
def manager(make: Callable[..., GPUResourceManager]) -> GPUResourceManager:
    return make()


def audit(manager: GPUResourceManager) -> None:
    """Check that free and allocated add up to the inventory, and that the manager shows what is stored."""
    stored = manager.store.refresh(None)
    assert stored is not None
    check(stored)
    assert manager.get_resource_summary() == summary(stored)


class TestAppendixC:
    """The original's own test cases (Appendix C)."""

    def test_allocate_success(self, manager: GPUResourceManager) -> None:
        result = manager.allocate_resources(task_id="test_001", required_gpus=4, required_cpus=32)
        assert result is not None
        assert {
            key: result[key]
            for key in ("server_id", "server_name", "gpu_ids", "cpu_count", "gpu_devices", "task_id")
        } == {
            "server_id": 0,
            "server_name": "gpu-server-0",
            "gpu_ids": [0, 1, 2, 3],
            "cpu_count": 32,
            "gpu_devices": "0,1,2,3",
            "task_id": "test_001",
        }

    @pytest.mark.parametrize(
        ("gpus", "cpus", "server"),
        [
            (1, 32, None),
            (9, 32, None),
            (0, 32, None),
            (-2, 32, None),
            (2, 0, None),
            (2, 65, None),
            (2, 8, 4),
            (2, 8, -1),
        ],
    )
    def test_allocate_invalid_params(
        self, manager: GPUResourceManager, gpus: int, cpus: int, server: int | None
    ) -> None:
        with pytest.raises(ValueError):
            manager.allocate_resources("test_002", gpus, cpus, server)
        audit(manager)
        assert manager.leases() == []

    def test_allocate_insufficient_resources(self, manager: GPUResourceManager) -> None:
        for i in range(16):
            assert manager.allocate_resources(f"test_{i:03d}", 2, 16) is not None
        assert manager.allocate_resources("test_fail", 2, 16) is None
        audit(manager)

    def test_release_success(self, manager: GPUResourceManager) -> None:
        assert manager.allocate_resources("test_release", 4, 32)
        assert manager.release_resources("test_release") is True
        assert manager.release_resources("test_release") is False
        assert manager.get_resource_summary()["servers"][0]["available_gpus"] == 8

    def test_concurrent_allocation(self, manager: GPUResourceManager) -> None:
        results = []
        barrier = threading.Barrier(10)

        def allocate() -> None:
            barrier.wait()
            results.append(manager.allocate_resources(f"concurrent_{threading.get_ident()}", 2, 16))

        threads = [threading.Thread(target=allocate) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(result is not None for result in results) == 10
        held = [(r["server_id"], gpu) for r in map(granted_lease, results) for gpu in r["gpu_ids"]]
        assert len(held) == len(set(held)) == 20


class TestOriginalResults:
    def test_the_preferred_server_is_chosen_if_it_fits(self, manager: GPUResourceManager) -> None:
        first = manager.allocate_resources("a", 6, 8, prefer_server_id=2)
        second = manager.allocate_resources("b", 4, 8, prefer_server_id=2)
        assert first is not None
        assert second is not None
        assert (first["server_id"], second["server_id"]) == (2, 0)

    def test_summary_has_the_originals_shape(self, manager: GPUResourceManager) -> None:
        manager.allocate_resources("a", 4, 32)
        summary = manager.get_resource_summary()
        assert summary["total_servers"] == 4
        expected = {
            "server_id": 0,
            "server_name": "gpu-server-0",
            "available_gpus": 4,
            "total_gpus": 8,
            "available_cpus": 32,
            "total_cpus": 64,
            "running_tasks": 1,
            "gpu_utilization": "50.0%",
            "cpu_utilization": "50.0%",
        }
        assert expected.items() <= summary["servers"][0].items()

    def test_server_states(self, manager: GPUResourceManager) -> None:
        manager.allocate_resources("half", 4, 32, prefer_server_id=0)
        manager.allocate_resources("all", 8, 8, prefer_server_id=1)
        manager.drain(2, reason="fan")
        manager.drain("gpu-server-3", failed=True)
        states = [server["state"] for server in manager.get_resource_summary()["servers"]]
        assert states == ["PARTIAL", "FULL", "DRAINED", "ERROR"]
        assert manager.resume(2)["state"] == "IDLE"

    @pytest.mark.parametrize("failed", [False, True])
    def test_nothing_of_a_closed_server_is_free(self, manager: GPUResourceManager, failed: bool) -> None:
        manager.allocate_resources("job", 2, 8, prefer_server_id=1)
        manager.allocate_resources("part", 1, 1, gpu_milli=400, prefer_server_id=1)
        manager.drain(1, failed=failed)
        server = manager.get_resource_summary()["servers"][1]
        expected = {
            "available_gpus": 0,
            "closed_gpus": 5,
            "total_gpus": 8,
            "gpu_utilization": "30.0%",
            "available_cpus": 0,
            "closed_cpus": 55,
            "total_cpus": 64,
            "running_tasks": 2,
        }
        assert expected.items() <= server.items()
        assert set(server["free_gpu_milli"].values()) == {0}
        needs = manager.explain("asks", 8, 60)["servers"][1]["reasons"]
        assert needs == ["failed" if failed else "drained"]
        opened = manager.resume(1)
        assert (opened["available_gpus"], opened["closed_gpus"], opened["available_cpus"]) == (5, 0, 55)

    def test_gpus_in_quarantine_are_used(self, manager: GPUResourceManager, clock: Clock) -> None:
        manager.allocate_resources("lost", 4, 8, ttl=10, quarantine=True)
        clock.now += 11
        manager.expire_and_schedule()
        [server, *_] = manager.get_resource_summary()["servers"]
        assert server["state"] == "ERROR"
        assert (server["available_gpus"], server["closed_gpus"], server["total_gpus"]) == (4, 0, 8)

    def test_reset_frees_everything_and_fencing_tokens_keep_growing(
        self, manager: GPUResourceManager
    ) -> None:
        before = manager.allocate_resources("a", 4, 32)
        assert manager.reset_resources() is True
        assert manager.leases() == []
        after = manager.allocate_resources("a", 4, 32)
        assert before is not None
        assert after is not None
        assert after["fencing_token"] > before["fencing_token"]

    def test_batch_grants_each_independently_in_one_commit(self, manager: GPUResourceManager) -> None:
        results = manager.allocate_batch(
            [{"task_id": f"t{i}", "required_gpus": 8, "required_cpus": 8} for i in range(5)]
        )
        assert [result and result["server_id"] for result in results] == [0, 1, 2, 3, None]
        audit(manager)

    def test_batch_with_one_bad_request_changes_nothing(self, manager: GPUResourceManager) -> None:
        with pytest.raises(ValueError):
            manager.allocate_batch(
                [
                    {"task_id": "a", "required_gpus": 2, "required_cpus": 8},
                    {"task_id": "b", "required_gpus": 1, "required_cpus": 8},
                ]
            )
        with pytest.raises(InvalidRequestError, match="twice"):
            manager.allocate_batch([{"task_id": "a", "required_gpus": 2, "required_cpus": 8}] * 2)
        assert manager.leases() == []

    def test_a_lock_timeout_returns_none_or_false(self, make: Callable[..., GPUResourceManager]) -> None:
        manager = make(lock_timeout_s=0.05)
        assert manager.allocate_resources("held", 2, 8)
        lock = manager.store.lock()
        assert lock.acquire(1)
        assert manager.allocate_resources("a", 2, 8) is None
        assert manager.release_resources("held") is False
        assert manager.allocate_batch([{"task_id": "a", "required_gpus": 2, "required_cpus": 8}]) == [None]
        assert manager.reset_resources() is False
        lock.release()
        assert manager.allocate_resources("a", 2, 8) is not None


class TestLeases:
    def test_a_repeated_request_returns_the_same_lease(self, manager: GPUResourceManager) -> None:
        first = manager.allocate_resources("a", 4, 32)
        assert manager.allocate_resources("a", 4, 32) == first
        with pytest.raises(DuplicateTaskError, match="already holds 4 GPUs"):
            manager.allocate_resources("a", 2, 32)

    def test_expiry_frees_and_renewal_prolongs(self, manager: GPUResourceManager, clock: Clock) -> None:
        manager.allocate_resources("kept", 2, 8, ttl=60)
        manager.allocate_resources("lost", 2, 8, ttl=60)
        clock.now += 50
        assert manager.renew("kept")["expires_at"] == clock.now + 60
        clock.now += 20
        manager.expire_and_schedule()
        assert [lease["task_id"] for lease in manager.leases()] == ["kept"]
        with pytest.raises(LeaseNotFoundError):
            manager.renew("lost")

    def test_a_renewal_returns_its_own_lease_and_not_a_later_one(self) -> None:
        class Followed(MemoryStore):
            """A store on which another releases a renewed lease at once and gets the task another one."""

            def commit(self, version: int, changes: Sequence[Change], **options: Any) -> None:
                super().commit(version, changes, **options)
                if any(isinstance(change, Renewed) for change in changes):
                    other = GPUResourceManager(renewing.settings, store=self)
                    assert other.release_resources("a")
                    assert other.allocate_resources("a", 2, 8)

        renewing = GPUResourceManager(Settings(store="memory://"), store=Followed())
        first = renewing.allocate_resources("a", 2, 8)
        assert first is not None
        assert renewing.renew("a")["fencing_token"] == first["fencing_token"]

    def test_any_change_expires_leases_that_are_due(self, manager: GPUResourceManager, clock: Clock) -> None:
        for i in range(4):
            manager.allocate_resources(f"t{i}", 8, 8, ttl=10)
        assert manager.allocate_resources("late", 8, 8) is None
        clock.now += 11
        assert manager.allocate_resources("late", 8, 8) is not None

    def test_quarantine_lasts_until_renewal_or_release(
        self, manager: GPUResourceManager, clock: Clock
    ) -> None:
        manager.allocate_resources("a", 8, 8, ttl=10, quarantine=True)
        clock.now += 11
        manager.expire_and_schedule()
        status = manager.status_of("a")
        assert status is not None
        assert status["state"] == "ERROR"
        assert manager.get_resource_summary()["servers"][0]["available_gpus"] == 0
        assert manager.renew("a")["state"] == "RUNNING"
        clock.now += 11
        manager.expire_and_schedule()
        assert manager.release_resources("a") is True

    def test_an_old_holder_cannot_release_the_lease_of_the_next(
        self, manager: GPUResourceManager, clock: Clock
    ) -> None:
        old = manager.allocate_resources("a", 2, 8, ttl=10)
        clock.now += 11
        new = manager.allocate_resources("a", 2, 8)
        assert old is not None
        assert new is not None
        assert manager.release_resources("a", fencing_token=old["fencing_token"]) is False
        with pytest.raises(LeaseNotFoundError):
            manager.renew("a", fencing_token=old["fencing_token"])
        assert manager.release_resources("a", fencing_token=new["fencing_token"]) is True

    @pytest.mark.parametrize("name", ["cpus", "gpus", "gpu_milli"])
    def test_resources_do_not_override_the_cpus_or_the_gpus(
        self, manager: GPUResourceManager, name: str
    ) -> None:
        """An order that compares shares counted the resource `gpu_milli` instead of the GPUs."""
        its = "which is a field of its own" if name == "gpu_milli" else "which are a field of their own"
        with pytest.raises(InvalidRequestError, match=rf"^resources has {name}, {its}: {name}$"):
            manager.allocate_resources("a", 2, 8, resources={name: 0})

    def test_fractions_of_one_gpu(self, manager: GPUResourceManager) -> None:
        shares = [manager.allocate_resources(f"s{i}", 1, 1, gpu_milli=300) for i in range(4)]
        assert [share and share["gpu_ids"] for share in shares] == [[0], [0], [0], [1]]
        with pytest.raises(ValueError, match="gpu_milli=300 goes with required_gpus=1, got required_gpus=2"):
            manager.allocate_resources("bad", 2, 1, gpu_milli=300)
        whole = manager.allocate_resources("whole", 6, 1)
        assert whole is not None
        assert whole["gpu_ids"] == [2, 3, 4, 5, 6, 7]


class TestQueue:
    def test_freed_capacity_is_granted_in_queue_order(self, manager: GPUResourceManager) -> None:
        for i in range(4):
            assert manager.submit(f"run{i}", 8, 8)["state"] == "RUNNING"
        assert queue_entry(manager.submit("big", 8, 8))["position"] == 1
        pending = queue_entry(manager.submit("small", 2, 8))
        assert (pending["state"], pending["position"]) == ("WAITING", 2)
        assert manager.release_resources("run2", outcome="SUCCESS")
        big = granted_lease(manager.status_of("big"))
        assert big is not None
        assert (big["state"], big["server_id"]) == ("RUNNING", 2)
        small = queue_entry(manager.status_of("small"))
        assert small is not None
        assert small["position"] == 1
        audit(manager)

    def test_a_later_request_does_not_overtake(self, manager: GPUResourceManager) -> None:
        for i in range(4):
            manager.submit(f"run{i}", 6, 8)
        manager.submit("big", 8, 8)
        assert manager.allocate_resources("nimble", 2, 8) is None
        assert manager.submit("nimble", 2, 8)["state"] == "WAITING"
        assert manager.cancel("big") is True
        assert manager.cancel("big") is False
        status = manager.status_of("nimble")
        assert status is not None
        assert status["state"] == "RUNNING"

    def test_priority_order(self, make: Callable[..., GPUResourceManager]) -> None:
        manager = make({"order": "priority"})
        for i in range(4):
            manager.submit(f"run{i}", 8, 8)
        manager.submit("low", 8, 8, priority=1)
        manager.submit("high", 8, 8, priority=5)
        assert [entry["task_id"] for entry in manager.queue()] == ["high", "low"]

    def test_a_repeated_submit_returns_the_same_queue_entry(self, manager: GPUResourceManager) -> None:
        for i in range(4):
            manager.submit(f"run{i}", 8, 8)
        first = manager.submit("a", 8, 8)
        assert manager.submit("a", 8, 8) == first
        with pytest.raises(DuplicateTaskError, match="already waits"):
            manager.submit("a", 4, 8)

    def test_a_request_that_can_never_fit_is_refused_at_once(self, manager: GPUResourceManager) -> None:
        with pytest.raises(InvalidRequestError, match="no server has an H100"):
            manager.submit("a", 8, 8, gpu_types=["H100"])
        with pytest.raises(UnknownNodeError):
            manager.submit("a", 8, 8, server="elsewhere")

    def test_a_request_for_a_drained_server_does_not_block_the_others(
        self, manager: GPUResourceManager
    ) -> None:
        manager.drain(1)
        assert manager.submit("pinned", 2, 8, server=1)["state"] == "WAITING"
        assert manager.submit("free", 2, 8)["state"] == "RUNNING"
        manager.resume(1)
        status = granted_lease(manager.status_of("pinned"))
        assert status is not None
        assert status["server_id"] == 1

    def test_a_request_that_is_cancelled_before_its_answer_names_its_task(
        self, manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for i in range(4):
            manager.submit(f"run{i}", 8, 8)
        explain = manager._commits.explain

        def cancelled_before(reader: Any) -> Any:
            manager.cancel("a")
            return explain(reader)

        monkeypatch.setattr(manager._commits, "explain", cancelled_before)
        with pytest.raises(LeaseNotFoundError, match=r"^task 'a' was queued, and has ended") as caught:
            manager.submit("a", 8, 8)
        assert caught.value.lease_id == "a"

    def test_expiry_grants_to_pending_requests(self, manager: GPUResourceManager, clock: Clock) -> None:
        for i in range(4):
            manager.submit(f"run{i}", 8, 8, ttl=10)
        manager.submit("next", 8, 8)
        clock.now += 11
        manager.expire_and_schedule()
        status = manager.status_of("next")
        assert status is not None
        assert status["state"] == "RUNNING"


class TestValuesThatCouldNotBeReadBack:
    """Such a value in a store would lock every other process out of the state until a reset."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("priority", 0.5),
            ("priority", "high"),
            pytest.param("priority", -(10**400), id="a priority beyond every other"),
            ("gpu_milli", 1000 / 3),
            ("quarantine", "no"),
            ("expected_runtime", float("nan")),
            pytest.param("expected_runtime", 10**400, id="an endless runtime"),
            ("resources", {"memory_mib": float("inf")}),
            ("resources", {"memory\nforged": 0}),
        ],
    )
    def test_are_refused(self, manager: GPUResourceManager, name: str, value: Any) -> None:
        version = manager.get_resource_summary()["version"]
        with pytest.raises(InvalidRequestError, match=name):
            manager.submit("t", 1 if name == "gpu_milli" else 2, 1, **{name: value})
        assert manager.get_resource_summary()["version"] == version

    def test_numbers_of_other_types_become_plain_ones(self, manager: GPUResourceManager) -> None:
        class Urgency(IntEnum):
            HIGH = 2

        lease = manager.allocate_resources("t", 2, 1, priority=Urgency.HIGH)
        assert lease is not None
        assert type(lease["priority"]) is int

    def test_a_server_marked_as_failed_with_text_is_stored_as_true(self, manager: GPUResourceManager) -> None:
        manager.drain(0, failed="disk")  # type: ignore[arg-type]
        assert snapshot_from_dict(manager.snapshot()).drained[0].failed is True


class TestServersAndHistory:
    @pytest.mark.parametrize(
        "reason", ["not searched for the cable yet", "fans; not searched", "older than the state of the art"]
    )
    def test_a_reason_that_reads_as_that_of_a_restore_is_refused(
        self, manager: GPUResourceManager, reason: str
    ) -> None:
        """The search after a restore, or a reset, opened such a server."""
        with pytest.raises(InvalidRequestError, match="is what a restore says of a server: use other words"):
            manager.drain(0, reason=reason)
        assert not manager.server(0)["drained"]

    def test_a_drained_server_keeps_its_leases_and_gets_no_new_ones(
        self, manager: GPUResourceManager
    ) -> None:
        manager.allocate_resources("a", 4, 8)
        manager.drain(0, reason="maintenance")
        result = manager.allocate_resources("b", 2, 8)
        assert result is not None
        assert result["server_id"] == 1
        assert [lease["task_id"] for lease in manager.leases()] == ["a", "b"]
        with pytest.raises(UnknownNodeError):
            manager.drain(17)

    def test_changing_the_inventory_never_drops_a_lease(self, manager: GPUResourceManager) -> None:
        for i in range(4):
            manager.allocate_resources(f"t{i}", 8, 8)
        redefine(manager, nodes=default_inventory(2, gpus=4))
        summary = manager.get_resource_summary()
        assert [server["server_name"] for server in summary["servers"] if server["retired"]] == [
            "gpu-server-2",
            "gpu-server-3",
        ]
        assert len(manager.leases()) == 4
        for i in range(4):
            assert manager.release_resources(f"t{i}")
        summary = manager.get_resource_summary()
        assert [server["available_gpus"] for server in summary["servers"]] == [4, 4]
        audit(manager)

    def test_a_server_that_another_process_added_is_known(
        self, make: Callable[..., GPUResourceManager]
    ) -> None:
        manager = make()
        other = GPUResourceManager(manager.settings, store=manager.store)
        redefine(other, nodes=default_inventory(5, cpus=128))
        assert manager.drain("gpu-server-4")["state"] == "DRAINED"
        redefine(other, nodes=default_inventory(6, cpus=256))
        result = manager.allocate_resources("a", 2, 256, server=5)
        assert result is not None
        assert result["server_name"] == "gpu-server-5"

    def test_explain_gives_reasons_per_server(self, manager: GPUResourceManager) -> None:
        manager.allocate_resources("a", 6, 60)
        manager.drain(1, reason="fan")
        answer = manager.explain("b", 4, 8)
        assert answer["fits"]
        assert answer["server_name"] == "gpu-server-2"
        reasons = [server["reasons"] for server in answer["servers"]]
        assert reasons[0] == ["2 of 8 GPUs free, 4 requested", "4 of 64 CPUs free, 8 requested"]
        assert reasons[1] == ["drained: fan"]
        assert reasons[2] == []
        assert manager.status_of("b") is None

    def test_history_is_the_audit_trail(self, manager: GPUResourceManager) -> None:
        manager.allocate_resources("a", 2, 8)
        manager.release_resources("a", outcome="SUCCESS")
        history = manager.history()
        assert [entry["change"] for entry in history] == ["granted", "released"]
        assert [entry["version"] for entry in history] == [1, 2]
        assert history[1]["outcome"] == "SUCCESS"
        assert manager.history(after=1, limit=10) == history[1:]

    def test_asyncio_has_the_same_methods(self, manager: GPUResourceManager) -> None:
        async def main() -> None:
            async with AsyncGPUResourceManager(manager) as face:
                results = await asyncio.gather(*(face.allocate_resources(f"t{i}", 2, 16) for i in range(16)))
                assert all(results)
                assert await face.allocate_resources_async("more", 2, 16) is None
                assert (await face.get_resource_summary())["leases"] == 16

        asyncio.run(main())

    @pytest.mark.parametrize("cancelled", [False, True])
    def test_asyncio_goes_on_however_many_wait(self, manager: GPUResourceManager, cancelled: bool) -> None:
        """A release must not wait for the very waits that it ends, nor closing for them."""

        async def main() -> list[Any]:
            face = AsyncGPUResourceManager(manager, max_workers=2)
            await face.submit("held", 8, server=0)
            await face.submit("next", 8, server=0)
            await face.submit("last", 8, server=0)
            waits = [asyncio.create_task(face.wait("next", 3600)) for _ in range(5)]
            late = asyncio.create_task(face.wait("last", 3600))
            await asyncio.sleep(0.1)
            for wait in waits if cancelled else ():
                wait.cancel()
            assert await asyncio.wait_for(face.release("held"), 10) == "released"
            ended = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 30)
            await asyncio.wait_for(face.close(), 30)
            for call in (late, face.wait("last", 1), face.leases()):
                with pytest.raises(ResourceManagerError, match="this AsyncGPUResourceManager is closed"):
                    await call
            return [each["state"] if isinstance(each, dict) else type(each) for each in ended]

        assert asyncio.run(main()) == [asyncio.CancelledError if cancelled else "RUNNING"] * 5

    def test_asyncio_closes_the_store_after_cancelled_calls_have_ended(self) -> None:
        """Closing never blocks the loop, which here lets the commit continue."""

        class Slow(MemoryStore):
            def __init__(self) -> None:
                super().__init__()
                self.begun, self.may_go_on = threading.Event(), threading.Event()
                self.done: list[str] = []

            def commit(self, *args: Any, **options: Any) -> None:
                self.begun.set()
                assert self.may_go_on.wait(10)
                super().commit(*args, **options)
                self.done.append("commit")

            def close(self) -> None:
                self.done.append("close")

        store = Slow()

        async def main() -> None:
            face = AsyncGPUResourceManager(GPUResourceManager(Settings(store="memory://"), store=store))
            asking = asyncio.create_task(face.allocate_resources("a", 2, 8))
            assert await asyncio.to_thread(store.begun.wait, 10)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            asyncio.get_running_loop().call_later(0.2, store.may_go_on.set)
            await face.close()

        asyncio.run(main())
        assert store.done == ["commit", "close"]


class TestRefusals:
    """`allocate` returns a lease or the refusal; the original's methods still return None."""

    def test_a_lease_or_the_refusal(self, clock: Clock) -> None:
        manager = small(clock)
        lease = manager.allocate("a", 6)
        assert isinstance(lease, Lease)
        assert (lease.placement.gpu_ids, lease.request.resources["cpus"]) == ((0, 1, 2, 3, 4, 5), 1)
        assert manager.allocate("a", 6) == lease, "asked twice"
        manager.submit("train_a", 6, 1)
        refused = manager.allocate("b", 2, 1)
        said = (
            "2 GPUs are free on gpu-server-0; reserved for train_a f462 (position 1, needs 6), "
            "first come, first served"
        )
        assert refused == Refusal(RefusalKind.BEHIND_QUEUE, said)
        assert manager.allocate_resources("b", 2, 1) is None
        answer = manager.explain("b", 2, 1)
        assert (answer["kind"], answer["reason"]) == ("behind_queue", said)
        status = queue_entry(manager.submit("b", 2, 1))
        assert (status["kind"], status["reason"], status["position"]) == ("behind_queue", said, 2)
        assert manager.queue()[1]["reason"] == said
        assert manager.allocate("b", 2, 1) == refused, "it is pending already"
        assert manager.allocate("train_a", 6, 1) == Refusal(
            RefusalKind.NO_CAPACITY, "no server with 6 GPUs: largest free is 2 on gpu-server-0"
        )

    def test_a_request_that_never_fits_is_a_refusal_here_and_an_error_in_submit(self, clock: Clock) -> None:
        manager = small(clock)
        refused = manager.allocate("t", 2, gpu_types=["H900"])
        said = "no server has an H900"
        assert refused == Refusal(RefusalKind.NEVER_FITS, said)
        assert manager.allocate_resources("t", 2, 1, gpu_types=["H900"]) is None
        with pytest.raises(NeverFitsError, match=said):
            manager.submit("t", 2, 1, gpu_types=["H900"])
        answer = manager.explain("t", 2, 1, gpu_types=["H900"])
        assert (answer["could_ever_fit"], answer["kind"], answer["reason"]) == (False, "never_fits", said)
        with pytest.raises(InvalidRequestError):
            manager.allocate("t", 99)

    def test_a_busy_lock_is_not_a_full_cluster(self, clock: Clock) -> None:
        store = MemoryStore(clock=clock)
        manager = GPUResourceManager(
            Settings(store="memory://", lock_timeout_s=0.05), store=store, inventory=default_inventory(1)
        )
        lock = store.lock()
        assert lock.acquire(0)
        assert manager.allocate("t", 2) == lock_busy(0.05)
        assert manager.allocate_batch([{"task_id": "t", "required_gpus": 2, "required_cpus": 1}]) == [None]
        with pytest.raises(LockTimeoutError):
            manager.submit("t", 2, 1)
        lock.release()
        assert isinstance(manager.allocate("t", 2), Lease)

    def test_a_recovery_window_is_not_a_full_cluster(self, clock: Clock) -> None:
        class Restarted(MemoryStore):
            def commit(self, version: int, changes: Sequence[Change], **options: Any) -> None:
                if any(isinstance(change, Granted) for change in changes):
                    raise StateUnconfirmedError("the store was restarted", remaining_s=48.0)
                super().commit(version, changes, **options)

        store = Restarted(clock=clock)
        manager = GPUResourceManager(Settings(store="memory://"), store=store, inventory=default_inventory(1))
        refused = manager.allocate("t", 2)
        assert isinstance(refused, Refusal)
        assert refused.kind is RefusalKind.RECOVERING
        assert re.match(
            r"the store restarted or was restored 1\d s ago; grants resume in 4\d s",
            refused.detail,
        )
        assert manager.allocate_resources("t", 2, 1) is None
        assert manager.explain("t", 2, 1)["kind"] == "recovering"
        status = queue_entry(manager.submit("t", 2, 1))
        assert (status["state"], status["kind"]) == ("WAITING", "recovering")
        start = manager.queue()[0]["estimated_start"]["at"]
        assert start == pytest.approx(clock.now + 48.0, abs=5), "not before grants resume"

    def test_a_batch_logs_its_refusals(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        manager = small(clock)
        batch = [{"task_id": f"t{i}", "required_gpus": 4, "required_cpus": 1} for i in range(3)]
        assert [bool(result) for result in manager.allocate_batch(batch)] == [True, True, False]
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            "no lease for t2: no_capacity: no server with 4 GPUs: none is free anywhere"
        ]


def small(clock: Clock) -> GPUResourceManager:
    """Return a manager of one server with 8 GPUs, first come, first served."""
    return GPUResourceManager(
        Settings(store="memory://"),
        cluster={"order": "fifo"},
        store=MemoryStore(clock=clock),
        inventory=default_inventory(1, 8, 64),
    )
