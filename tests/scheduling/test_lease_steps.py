"""What the owner of a lease asks for, and its expiry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    Quarantined,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.models import Request
from resource_manager.errors import LeaseNotFoundError
from resource_manager.scheduling import lease_steps
from tests.scheduling.test_allocator import Untouched, cluster, held

__all__ = ["cluster"]


@pytest.mark.parametrize("token", [None, 7])
def test_a_lease_is_released_or_renewed_by_task_id(cluster: Untouched, token: int | None) -> None:
    cluster.move(held("t", "a", token=7, ttl_s=60.0))
    ended = lease_steps.release(cluster, "t", 5.0, fencing_token=token, outcome="success")
    assert ended == [Released("t", 7, 5.0, "success")]
    assert lease_steps.release(cluster, "t", 5.0) == [Released("t", 7, 5.0, "")]
    assert lease_steps.renew(cluster, "t", 5.0, fencing_token=token) == [Renewed("t", 7, 5.0, 65.0)]


@pytest.mark.parametrize("step", [lease_steps.release, lease_steps.renew])
@pytest.mark.parametrize(("task_id", "token"), [("t", 6), ("t", 8), ("t", 0), ("u", None), ("u", 7)])
def test_a_lease_with_another_fencing_token_is_not_changed(
    cluster: Untouched, step: Callable[..., list[Change]], task_id: str, token: int | None
) -> None:
    cluster.move(held("t", "a", token=7))
    with pytest.raises(LeaseNotFoundError) as caught:
        step(cluster, task_id, 5.0, fencing_token=token)
    assert (caught.value.lease_id, caught.value.fencing_token) == (task_id, token)


def test_a_lease_that_is_not_renewed_expires_or_is_quarantined(cluster: Untouched) -> None:
    cluster.move(
        held("keep", "a", 1, token=1, ttl_s=10.0, quarantine=True),
        held("drop", "b", 1, token=2, ttl_s=20.0),
        held("later", "b", 0, token=3, ttl_s=30.0),
    )
    assert lease_steps.expire(cluster, 20.0) == [Quarantined("keep", 1, 20.0), Expired("drop", 2, 20.0)]


def test_a_pending_request_is_cancelled_by_task_id(cluster: Untouched) -> None:
    cluster.move(held("runs", "a"), Queued(Request("t", 4), 1.0, 1, 1.0))
    assert lease_steps.cancel(cluster, "t", 2.0, "tired") == [Cancelled("t", 2.0, "tired")]
    assert lease_steps.cancel(cluster, "t", 2.0) == [Cancelled("t", 2.0, "")]
    with pytest.raises(LeaseNotFoundError) as caught:
        lease_steps.cancel(cluster, "runs", 2.0)
    assert caught.value.lease_id == "runs"
