"""Every change is made once under one idempotency key, whenever its caller died and sends it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore, Refusal, Settings
from resource_manager.errors import AlreadyDoneError, IdempotencyKeyError, LeaseNotFoundError
from resource_manager.manager.results import ReleaseResult
from resource_manager.storage.once import KEEP_S, Once
from tests.builders import Clock


def once(key: str = "k", request: str = "f") -> Once:
    return Once("ada", key, request)


class Mortal(MemoryStore):
    """A store that kills its caller after a commit, before the answer, as often as `deaths` says."""

    deaths = 0

    def commit(self, *args: Any, **options: Any) -> None:
        super().commit(*args, **options)
        if self.deaths:
            self.deaths -= 1
            raise KeyboardInterrupt


@pytest.fixture
def store(clock: Clock) -> Mortal:
    return Mortal(clock=clock)


@pytest.fixture
def manager(store: Mortal) -> GPUResourceManager:
    return GPUResourceManager(Settings(store="memory://"), store=store, cluster={"lease_ttl_s": 600})


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda m, key: m.try_allocate("new", 2, once=key)["fencing_token"], 2),
        (lambda m, key: m.submit("new", 2, once=key)["state"], "RUNNING"),
        (lambda m, key: m.submit("never before", 8, server=0, once=key)["state"], "WAITING"),
        (lambda m, key: m.release("held", once=key), ReleaseResult.RELEASED),
        (lambda m, key: m.cancel("waits", once=key), True),
        (lambda m, key: m.renew("held", once=key)["task_id"], "held"),
        (lambda m, key: m.preempt("held", once=key)["preempted_by"], "waits"),
        (lambda m, key: m.drain(1, once=key)["drained"], True),
        (lambda m, key: m.try_allocate_batch([{"task_id": "x", "gpus": 2}], once=key)[0]["task_id"], "x"),
    ],
    ids=["allocate", "submit", "queue", "release", "cancel", "renew", "preempt", "drain", "batch"],
)
def test_killed_between_commit_and_answer_it_acts_once(
    manager: GPUResourceManager,
    store: Mortal,
    clock: Clock,
    change: Callable[[GPUResourceManager, Once], Any],
    answer: object,
) -> None:
    manager.allocate("held", 2, server=0)
    if answer in (True, "waits"):  # it would stand before the others
        manager.submit("waits", 8, server=0)
    before = len(store.history())
    store.deaths = 1
    with pytest.raises(KeyboardInterrupt):
        change(manager, once())
    made = len(store.history()) - before
    assert made > 0
    clock.now += 120
    restarted = GPUResourceManager(Settings(store="memory://"), store=store, cluster={"lease_ttl_s": 600})
    again = once()
    assert change(restarted, again) == answer
    assert again.repeated
    assert len(store.history()) - before == made


def test_the_lease_of_the_first_call_may_have_ended(manager: GPUResourceManager, clock: Clock) -> None:
    for number, act in enumerate(
        (
            lambda key: manager.try_allocate("t", 2, once=key),
            lambda key: manager.submit("t", 2, once=key),
        )
    ):
        act(once(str(number)))
        manager.release("t")
        with pytest.raises(AlreadyDoneError, match="has ended: use a new key for a new request"):
            act(once(str(number)))
        clock.now += 1
        manager.allocate("t", 2)  # another request, under the same id
        with pytest.raises(AlreadyDoneError):
            act(once(str(number)))
        manager.release("t")


def test_a_submission_is_recognised_after_it_was_granted_from_the_queue(manager: GPUResourceManager) -> None:
    manager.allocate("held", 8, server=0)
    assert manager.submit("t", 8, server=0, once=once())["state"] == "WAITING"
    manager.release("held")
    assert manager.submit("t", 8, server=0, once=once())["state"] == "RUNNING"


def test_a_batch_answers_again_what_it_granted_and_what_not(manager: GPUResourceManager) -> None:
    batch = [{"task_id": name, "gpus": 8, "server": 0} for name in "ab"]
    first = manager.try_allocate_batch(batch, once=once())
    again = manager.try_allocate_batch(batch, once=once())
    assert again[0] == first[0]
    assert isinstance(first[1], Refusal)
    assert isinstance(again[1], Refusal)


def test_a_batch_answers_again_what_it_had_before(manager: GPUResourceManager) -> None:
    """Who lost the first answer believed that the lease was not granted, and its GPUs stayed allocated."""
    manager.try_allocate("had", 2)
    manager.try_allocate("of another", 2)
    batch = [{"task_id": name, "gpus": gpus} for name, gpus in (("had", 2), ("new", 2), ("of another", 3))]
    first = manager.try_allocate_batch(batch, once=once())
    again = manager.try_allocate_batch(batch, once=once())
    assert first[:2] == again[:2]
    assert [isinstance(each, Refusal) for each in again] == [False, False, True]


def test_a_reset_is_made_once(manager: GPUResourceManager) -> None:
    manager.allocate("t", 2)
    manager.reset(once=once())
    manager.allocate("u", 2)
    manager.reset(once=once())
    assert [lease["task_id"] for lease in manager.leases()] == ["u"]


def test_what_changed_nothing_is_tried_again(manager: GPUResourceManager) -> None:
    assert manager.release("t", once=once()) is ReleaseResult.NOT_HELD
    with pytest.raises(LeaseNotFoundError):
        manager.renew("t", once=once("renew"))
    manager.allocate("t", 2)
    assert manager.release("t", once=once()) is ReleaseResult.RELEASED


def test_a_key_is_for_one_request_and_one_day(manager: GPUResourceManager, clock: Clock) -> None:
    manager.drain(0, once=once())
    with pytest.raises(IdempotencyKeyError):
        manager.resume(0, once=once(request="another"))
    clock.now += KEEP_S
    assert not manager.resume(0, once=once(request="another"))["drained"]
