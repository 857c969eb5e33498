"""A new kind of change: its class, how it applies, its place in Redis and its words are all that it needs.

One with a part of the state of its own needs what that was before the history, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest

from resource_manager.core import changes, cluster
from resource_manager.core.changes import Change, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.manager.wording import What, describe, matches
from resource_manager.scheduling.accounting.lives import lives_of
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.storage import Store, codec
from resource_manager.storage.history_file import StoreHistory, collect, to_lines
from resource_manager.storage.redis import layout
from simulator.replay.history import workload_of
from simulator.replay.replay import Replay
from tests.edited_product import run_with
from tests.redis_server import RedisServer
from tests.storage.walk import first_state, started

TABLES = {
    "core/changes.py": lambda: set(get_args(Change)),
    "core/cluster.py": lambda: set(cluster._APPLY),
    "storage/redis/layout.py": lambda: set(layout.OPERATIONS),
    "manager/wording.py": lambda: {codec._CHANGES[kind] for what in What for kind in what.kinds},
}
"""The product files that must know every kind, with the kinds that each knows."""


def test_four_files_know_every_kind_of_change() -> None:
    defined = [kind for kind in vars(changes).values() if isinstance(kind, type)]
    kinds = {kind for kind in defined if kind.__module__ == changes.__name__ and hasattr(kind, "at")}
    assert len(TABLES) <= 4
    assert {name: table() for name, table in TABLES.items()} == dict.fromkeys(TABLES, kinds)


@dataclass(frozen=True, slots=True)
class Inspected:
    """Somebody looked at a server and found it in order."""

    node: str
    at: float
    reason: str = ""
    by: str = ""


@pytest.fixture
def new_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the kind where those four files name it."""
    monkeypatch.setitem(codec._CHANGES, "inspected", Inspected)
    monkeypatch.setitem(codec._TAGS, Inspected, "inspected")
    monkeypatch.setitem(cluster._APPLY, Inspected, lambda state, change: state.node(change.node))
    monkeypatch.setitem(layout.OPERATIONS, Inspected, ("rule", lambda change: f"inspected:{change.node}"))
    monkeypatch.setattr(What.AGENT, "kinds", (*What.AGENT.kinds, "inspected"))


def test_a_new_kind_goes_through_stores_history_walk_words_and_replay(
    new_kind: None, open_client: Callable[[], Store]
) -> None:
    store = open_client()
    state: ClusterState = started(store)
    now = store.now()
    lease = Lease(Request("t", 1), (Placement("gpu-server-0", (0,)),), 1, now)
    made: list[object] = [Granted(lease, now), Inspected("gpu-server-1", now, "dust", "ada")]
    store.commit(state.version, made, now=now)  # type: ignore[arg-type]
    for change in made:
        state.apply(change)  # type: ignore[arg-type]
    other = open_client().refresh(None)
    assert other is not None
    assert replace(other.snapshot(), version=0) == replace(state.snapshot(), version=0)
    history = collect(StoreHistory(store))
    assert list(history.changes) == made
    assert lives_of(first_state(), history.changes).lives.keys() == {1}
    [_, entry] = StoreHistory(store).history()
    assert describe(entry) == "gpu-server-1 dust"
    assert matches(entry, "ada", What.AGENT)
    assert len(list(to_lines(history))) == 3
    replayed = Replay(workload_of(history, "history"), get_policy("first_fit"), get_order("fifo")).run()
    assert [run.started_at for run in replayed.job_runs.values()] == [now]


DECLARED = {
    "core/changes.py": {
        "Change = (\n": '''@dataclass(frozen=True, slots=True)
class BannerChanged:
    """What all users are told is replaced."""

    text: str
    at: float
    by: str = ""


''',
        "    Granted\n    | Released\n": "    BannerChanged |\n",
    },
    "core/cluster.py": {
        "    attained: Mapping[str, int] = field(default_factory=dict)\n": '    banner: str = ""\n',
        "        self.failed_starts: FailedStarts = {}\n": '        self.banner = ""\n',
        "            windows=self.windows,\n": "            banner=self.banner,\n",
        "        cluster.windows = snapshot.windows\n": "        cluster.banner = snapshot.banner\n",
        "    changes.Granted: ClusterState._granted,\n": (
            '    changes.BannerChanged: lambda state, change: state._set("banner", change.text),\n'
        ),
    },
    "storage/redis/layout.py": {
        '    changes.Granted: ("grant", attrgetter("lease.lease_id")),\n': (
            '    changes.BannerChanged: ("rule", lambda change: "banner"),\n'
        ),
        "    if snapshot.windows:\n": """    if snapshot.banner:
        parts += ("rule", "banner", change_to_json(changes.BannerChanged(snapshot.banner, 0.0)))
""",
        "            windows=_rule(rules, MAINTENANCE, changes.MaintenanceChanged((), 0.0)).windows,\n": (
            '            banner=_rule(rules, "banner", changes.BannerChanged("", 0.0)).text,\n'
        ),
    },
    "storage/history_file.py": {
        "        watched=_watched_before(now, changes),\n": (
            '        banner="" if any(isinstance(c, kinds.BannerChanged) for c in changes) else now.banner,\n'
        ),
    },
    "manager/wording.py": {'    SUBMIT = "submit", "queued"\n': '    BANNER = "banner", "bannerchanged"\n'},
}
"""Product files -> the line that stands beside what they need -> what they need."""

USES = """
import sys
from resource_manager import GPUResourceManager
from resource_manager.core.changes import BannerChanged
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.storage import history_file, open_store

for url in sys.argv[1:]:
    with GPUResourceManager.from_url(url, inventory=default_inventory(1)) as manager:
        manager.submit("t", 1)
    store = open_store(url)
    cluster = store.refresh(None)
    change = BannerChanged("closed on Friday", store.now(), by="ada")
    store.commit(cluster.version, [change], now=change.at)
    with cluster.trial():
        cluster.apply(change)
    assert cluster.banner == "", cluster.banner
    assert store.refresh(cluster).banner == "closed on Friday", url
    assert store.refresh(None).banner == "closed on Friday", url
    [*_, (version, last)] = store.history()
    assert last == change, last
    assert history_file.collect(history_file.StoreHistory(store)).before.banner == ""
    store.replace(store.refresh(None).snapshot())
    assert open_store(url).refresh(None).banner == "closed on Friday", url
    with GPUResourceManager.from_url(url) as manager:
        [*_, told] = manager.history()
        assert told["text"] == "closed on Friday" and told["by"] == "ada", told
        assert manager.history(what="banner") == [told]
"""


def test_a_new_part_of_the_state_is_kept_read_and_undone_on_each_store(
    tmp_path: Path, embedded_redis: RedisServer
) -> None:
    """A replay would begin with its default, did the history not know what it was before."""
    assert DECLARED.keys() - TABLES.keys() == {"storage/history_file.py"}
    stores = (f"sqlite:///{tmp_path}/state.db", embedded_redis.fresh_url())
    run_with(DECLARED, USES, tmp_path, *stores)
