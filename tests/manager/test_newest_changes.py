"""The history read backwards, and the names of what its changes mention."""

from __future__ import annotations

from resource_manager import GPUResourceManager
from resource_manager.core.models import Node
from resource_manager.core.names import short_id
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.newest_changes import names_at, newest_changes
from resource_manager.storage.memory import MemoryStore


def test_changes_are_named_as_they_were_then() -> None:
    """The same task asks again after its release, which is another lease with another name."""
    servers: list[Node] = default_inventory(1, 2, 8)
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
