"""The history read backwards, and the names of what its changes mention."""

from __future__ import annotations

from bisect import bisect_right

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.names import short_id
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.recorded_changes import ended_by_others, names_at, newest_changes
from resource_manager.manager.results import Recorded, Renewal
from resource_manager.storage.memory import MemoryStore


@pytest.mark.parametrize("jump", [2**20, 2**32, 10**12])
def test_the_changes_before_a_jump_of_versions_come_after_it(jump: int) -> None:
    """A restart of the store, a restore and a reset let the version jump and keep the history."""
    kept = [*range(1, 1501), *range(jump, jump + 1200), jump + 5 * 10**6]

    def history(after: int, limit: int) -> list[Recorded]:
        first = bisect_right(kept, after)
        return [{"version": version} for version in kept[first : first + limit]]

    found = [change["version"] for change in newest_changes(history, kept[-1] + 3)]
    assert found == kept[::-1]
    assert list(newest_changes(lambda after, limit: [], 10**12)) == []


def test_changes_are_named_as_they_were_then() -> None:
    """The same task asks again after its release, which is another lease with another name."""
    servers = default_inventory(1, 2, 8)
    with GPUResourceManager(store=MemoryStore(), inventory=servers) as manager:
        for _ in range(2):
            manager.submit("t", 2)
            manager.submit("waits", 2)
            manager.preempt("t", preemptor="waits")
            manager.release("t")
            manager.release("waits")
        version = manager.get_resource_summary()["version"]
        newest_first = list(newest_changes(manager.history, version))
    shown = [change for change in newest_first if change["change"] in ("preempting", "released")]
    names = [names_at(shown, newest_first)[change["version"]] for change in reversed(shown)]
    assert [tuple(sorted(each.values())) for each in names] == [
        (f"t {short_id(1)}", f"waits {short_id(2)}"),
        (f"t {short_id(1)}",),
        (f"waits {short_id(2)}",),
        (f"t {short_id(3)}", f"waits {short_id(4)}"),
        (f"t {short_id(3)}",),
        (f"waits {short_id(4)}",),
    ]
    assert names_at(shown, []) == {change["version"]: {} for change in shown}


def test_who_released_a_lease_is_known_after_many_renewals_of_others() -> None:
    """Its worker notices at its next renewal; until then hundreds of others renew theirs."""
    with GPUResourceManager(store=MemoryStore(), inventory=default_inventory(25, 8, 64)) as manager:
        for count in range(200):
            manager.submit(f"t{count}", 1)
        manager.release("t0", reason="needs it")
        kept: list[Renewal] = [
            {"task_id": lease["task_id"], "fencing_token": lease["fencing_token"]}
            for lease in manager.leases()
        ]
        for _ in range(24):
            assert all(manager.renew_all(kept))
        assert ended_by_others(manager, "t0").endswith(" released its lease: needs it")
