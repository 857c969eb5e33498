"""A new kind of change, with a part of the state that it alone changes: four files are all that it needs."""

from __future__ import annotations

from pathlib import Path

from tests.edited_product import run_with
from tests.redis_server import RedisServer

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
"""


def test_a_new_kind_of_change_is_kept_read_and_undone_on_each_store(
    tmp_path: Path, embedded_redis: RedisServer
) -> None:
    assert len(DECLARED) <= 4
    stores = (f"sqlite:///{tmp_path}/state.db", embedded_redis.fresh_url())
    run_with(DECLARED, USES, tmp_path, *stores)
