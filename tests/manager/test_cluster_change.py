"""The stored cluster: what a file would change, its commit in one, and what no file takes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.changes import GpuClosed
from resource_manager.core.models import Gpu
from resource_manager.errors import ClusterChangedError, InvalidRequestError, SettingsError
from resource_manager.manager.cluster_change import ApplyOptions
from resource_manager.manager.cluster_file.reading import ClusterFiles
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import ORDERS
from tests.builders import nodes, present

TWO_SERVERS = {"servers": [{"name": name, "id": i, "gpus": 4, "cpus": 8} for i, name in enumerate("ab")]}
WINDOW = {"servers": ["a"], "from": "2126-12-01T08:00Z", "until": "2126-12-01T12:00Z", "every": "week"}


def form(**sections: Any) -> ClusterForm:
    return ClusterForm.model_validate(sections)


@pytest.fixture
def manager() -> GPUResourceManager:
    manager = GPUResourceManager(Settings(store="redis://unused"), store=MemoryStore(), by="ada")
    manager.apply(form(**TWO_SERVERS))
    assert not manager.diff(form(**TWO_SERVERS))["changed"]
    return manager


def lines(manager: GPUResourceManager, *, options: ApplyOptions | None = None, **sections: Any) -> list[str]:
    return manager.diff(form(**sections), options)["lines"]


def test_a_difference_has_a_line_for_each_thing_that_changes(manager: GPUResourceManager) -> None:
    assert lines(
        manager,
        cluster={"order": "fifo", "lease_ttl": "1h"},
        servers=[
            {"name": "a", "gpus": 4, "gpu_type": "H100", "cpus": 16},
            {"name": "c", "gpus": 2, "cpus": 4},
        ],
        teams={"vision": {"guaranteed": 2}},
        maintenance=[WINDOW],
        health={"xid 63": "note"},
    ) == [
        "~ order priority+backfill → fifo",
        "~ lease_ttl 86400 → 3600",
        "+ health xid 63: note",
        "- server b",
        "~ server a: cpus 8 → 16; 4 × GPU → 4 × H100",
        "+ server c, 2 × GPU",
        "+ team vision, guaranteed 2",
        "+ maintenance of a every week from 2126-12-01T08:00Z until 2126-12-01T12:00Z",
    ]


def test_all_of_it_is_one_commit_that_says_who_asked_and_what_changed(manager: GPUResourceManager) -> None:
    before = manager.snapshot().get("version", 0)
    made = manager.apply(
        form(cluster={"policy": "best_fit"}, teams={"vision": {"limit": 4}}, maintenance=[WINDOW])
    )
    assert not manager.diff(form(cluster={"policy": "best_fit"}))["changed"]
    changes = manager.history(before)
    assert [change["change"] for change in changes] == [
        "clustersettingschanged",
        "teamschanged",
        "maintenancechanged",
    ]
    assert {(change["by"], change["at"]) for change in changes} == {("ada", changes[0]["at"])}
    assert [change["lines"][0] for change in changes[:2]] == made["lines"][:2]


def test_a_section_is_the_whole_of_it_and_one_that_is_not_there_stays(manager: GPUResourceManager) -> None:
    manager.apply(form(cluster={"policy": "best_fit", "order": "fifo"}, health={"xid 63": "note"}))
    assert lines(manager, cluster={"policy": "best_fit"}) == ["~ order fifo → priority+backfill"]
    assert lines(manager, teams={}) == lines(manager, cluster={}) == lines(manager) == []


def test_a_section_ends_only_if_it_is_named(manager: GPUResourceManager) -> None:
    manager.apply(
        form(
            cluster={"order": "fifo"},
            teams={"vision": {"limit": 4}},
            maintenance=[WINDOW],
            health={"x": "note"},
        )
    )
    everything = ApplyOptions(remove=("cluster", "teams", "maintenance", "health"))
    assert len(lines(manager, options=everything)) == 4
    manager.apply(form(), everything)
    assert list(manager.cluster()["sections"]) == ["servers"]
    with pytest.raises(InvalidRequestError, match="remove: 'servers' is not one of cluster, teams"):
        manager.diff(form(), ApplyOptions(remove=("servers",)))


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        ({"cluster": {"policy": "magic"}}, "cluster.policy", "policy magic: unknown policy 'magic'"),
        ({"cluster": {"order": "magic"}}, "cluster.order", "order magic: unknown queue order 'magic'"),
        ({"servers": TWO_SERVERS["servers"][1:]}, "servers", r"server a: it has 1 lease \(--retire a\)"),
        ({"teams": {"x": {"guaranteed": 9}}}, "teams.x.guaranteed", "add up to 9"),
        ({"maintenance": [{**WINDOW, "servers": ["c"]}]}, "maintenance.0.servers", "'c'"),
        (
            {
                "cluster": {"order": "fifo"},
                "servers": TWO_SERVERS["servers"][:1],
                "teams": {"x": {"guaranteed": 5}},
            },
            "teams.x.guaranteed",
            "add up to 5",
        ),
    ],
)
def test_what_is_refused_changes_nothing(
    manager: GPUResourceManager, sections: dict[str, Any], field: str, said: str
) -> None:
    manager.allocate("x", 1, server="a")
    before = manager.snapshot()
    with pytest.raises(InvalidRequestError, match=said) as caught:
        manager.apply(form(**sections))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert manager.snapshot() == before


def test_a_guarantee_above_the_servers_that_stay_is_refused(manager: GPUResourceManager) -> None:
    manager.apply(form(teams={"x": {"guaranteed": 8}}))
    with pytest.raises(InvalidRequestError, match="add up to 8") as caught:
        manager.apply(form(servers=TWO_SERVERS["servers"][:1]))
    assert caught.value.field == "servers"


def test_a_server_that_a_window_of_the_file_names_stays_with_it(manager: GPUResourceManager) -> None:
    manager.apply(form(maintenance=[WINDOW]))
    with pytest.raises(InvalidRequestError, match=r"server a: a window of \[\[maintenance\]\] names it"):
        manager.apply(form(servers=TWO_SERVERS["servers"][1:]))
    manager.apply(form(servers=TWO_SERVERS["servers"][1:]), ApplyOptions(remove=("maintenance",)))
    assert [node.name for node in manager.inventory] == ["b"]


def test_a_server_with_leases_retires_if_it_is_named(manager: GPUResourceManager) -> None:
    manager.allocate("x", 1, server="a")
    retire, of_b = ApplyOptions(retire=("a",)), form(servers=TWO_SERVERS["servers"][1:])
    assert manager.diff(of_b, retire)["lines"] == ["- server a, once 1 lease ended"]
    manager.apply(of_b, retire)
    assert [lease["task_id"] for lease in manager.leases()] == ["x"]
    assert [node.name for node in manager.inventory] == ["b"]
    manager.release("x")
    assert [server["server_name"] for server in manager.get_resource_summary()["servers"]] == ["b"]
    with pytest.raises(InvalidRequestError, match="retire: there is no server 'a'"):
        manager.diff(of_b, retire)


def test_a_number_means_the_server_of_the_file_while_another_that_had_it_retires(
    manager: GPUResourceManager,
) -> None:
    manager.allocate("x", 1, server="a")
    b_alone = form(servers=[{"name": "b", "gpus": 4, "cpus": 8}])
    manager.apply(b_alone, ApplyOptions(retire=("a",)))
    assert {row["server_name"]: row["server_id"] for row in manager.servers()} == {"b": 0, "a": 2}
    assert manager.drain(0, reason="fan")["server_name"] == "b"
    assert [lease["server_id"] for lease in manager.leases()] == [2]


@pytest.mark.parametrize(
    "same", [{"gpus": 1, "address": "10.0.0.1"}, {"gpus": [{"count": 1, "uuids": ["GPU-1"]}]}]
)
def test_a_server_with_leases_gets_no_other_name(manager: GPUResourceManager, same: Any) -> None:
    """Its GPUs were given to others at once: by that name they were free."""

    def named(name: str) -> ClusterForm:
        return form(servers=[{"name": name, "cpus": 8, **same}])

    manager.apply(named("gpu-a"))
    manager.allocate("x", 1)
    retire = ApplyOptions(retire=("gpu-a",))
    for options, before in ((retire, "gpu-a"), (None, "b")):
        with pytest.raises(InvalidRequestError) as refused:
            manager.apply(named("gpu-b"), options)
        assert str(refused.value) == (
            "server gpu-b: it has GPUs of gpu-a, on which 1 lease must end before"
        ), before
        manager.apply(form(servers=[{"name": "b", "gpus": 2, "cpus": 8}]), options)
    manager.release("x")
    assert manager.apply(named("gpu-b"))["changed"]


def test_two_servers_with_leases_do_not_change_names(manager: GPUResourceManager) -> None:
    def at(*addresses: str) -> ClusterForm:
        names = zip(TWO_SERVERS["servers"], addresses, strict=True)
        return form(servers=[{**server, "address": address} for server, address in names])

    manager.apply(at("10.0.0.1", "10.0.0.2"))
    manager.allocate("x", 1, server="a")
    with pytest.raises(InvalidRequestError, match="server b: it has GPUs of a, on which 1 lease must end"):
        manager.apply(at("10.0.0.2", "10.0.0.1"))
    assert manager.apply(at("10.0.0.3", "10.0.0.2"))["changed"]
    assert manager.apply(at("10.0.0.3", "10.0.0.3"))["changed"], "that one gets it, and the other keeps it"


def test_the_second_of_two_people_is_told_that_the_cluster_changed(manager: GPUResourceManager) -> None:
    mine, theirs = form(cluster={"order": "fifo"}), form(cluster={"order": "srtf"})
    shown = [manager.diff(each)["revision"] for each in (mine, theirs)]
    manager.apply(mine, revision=shown[0])
    with pytest.raises(ClusterChangedError, match="changed since"):
        manager.apply(theirs, revision=shown[1])
    assert manager.cluster()["sections"]["cluster"] == {"order": "fifo"}
    manager.allocate("x", 1)  # a lease is not of the cluster
    assert manager.diff(theirs)["revision"] == manager.cluster()["revision"]


def test_another_process_goes_by_the_new_settings(manager: GPUResourceManager) -> None:
    other = GPUResourceManager(Settings(store="redis://unused"), store=manager.store)
    manager.apply(form(cluster={"max_gpus": 2, "lease_ttl": 60, "max_priority": 3}))
    with pytest.raises(InvalidRequestError, match=r"between 1 and 2 \(set by max_gpus of the cluster\)"):
        other.allocate("y", 4)
    with pytest.raises(InvalidRequestError, match="priority must be at most 3"):
        other.submit("y", 1, priority=4)
    other.allocate("y", 1)
    [lease] = (lease for lease in other.leases() if lease["task_id"] == "y")
    assert present(lease["expires_at"]) - lease["granted_at"] == 60
    manager.apply(form(cluster={"max_gpus": 4}))
    assert other.allocate("z", 4)


def test_what_waits_starts_with_the_settings_that_let_it(manager: GPUResourceManager) -> None:
    manager.apply(form(teams={"x": {"limit": 1}}))
    manager.submit("x", 2, team="x")
    manager.apply(form(teams={"x": {"limit": 2}}))
    assert [lease["task_id"] for lease in manager.leases()] == ["x"]


# ---- what no file takes back ----


def test_an_old_file_loses_no_adoption_drain_closure_or_window(tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    path.write_text('[[servers]]\nname = "{id}"\ncount = 3\ngpus = 2\ncpus = 8\n'.replace("{id}", "s{id}"))
    file = ClusterFiles([path]).definition
    manager = GPUResourceManager(Settings(store="memory://"), store=MemoryStore(), inventory=file.nodes)
    adopted = tuple(Gpu(number, uuid=f"GPU-{number}") for number in range(2))
    manager.adopt("s0", adopted)
    manager.drain("s1", failed=True, reason="Xid 79")
    manager.commit(lambda cluster, now: [GpuClosed("s2", 1, "", "fan", now)])
    once = {key: value for key, value in WINDOW.items() if key != "every"}
    manager.add_maintenance(WindowForm.of(**{**once, "servers": ["s2"]}))
    kept = manager.snapshot()
    assert not manager.apply(file)["changed"]
    assert manager.snapshot() == kept
    # Away and back again: what was found on the servers stays true of them.
    manager.apply(ClusterForm.model_validate({"servers": [{"name": "other", "cpus": 8}]}))
    manager.apply(file)
    back = manager.snapshot()
    for key in ("nodes", "drained", "closed_gpus", "windows", "adoptions"):
        assert back[key] == kept[key], key


def test_a_file_that_contradicts_an_adoption_is_refused_and_says_whose_it_is(
    manager: GPUResourceManager,
) -> None:
    with asked_by("bob"):
        manager.adopt("a", [Gpu(number, uuid=f"GPU-{number}") for number in range(3)])
    with pytest.raises(InvalidRequestError, match=r"server a: its 3 × GPU were adopted at \S+ by bob, and"):
        manager.apply(form(**TWO_SERVERS))
    manager.apply(form(**TWO_SERVERS), ApplyOptions(force=True))
    assert len(manager.inventory[0].gpus) == 4
    assert not manager.apply(form(**TWO_SERVERS))["changed"]


# ---- round trip ----


def random_sections(draw: random.Random) -> dict[str, Any]:
    """Return a whole cluster that no check refuses."""

    def some(**values: Any) -> dict[str, Any]:
        return {key: value for key, value in values.items() if draw.random() < 0.5}

    def group(first: int, server: int) -> dict[str, Any]:
        ids = [first + 2 * number for number in range(draw.randint(1, 3))]
        uuids = [f"GPU-{server}-{number}" for number in ids]
        return {"ids": ids, **some(type=draw.choice("AB"), memory_mib=draw.randint(1, 9), uuids=uuids)}

    servers = [
        {
            "name": f"s{number}",
            "cpus": draw.randint(1, 9),
            **some(
                id=10 * number + draw.randrange(10),
                address="10.0.0.7",
                memory_mib=draw.randint(1, 9),
                vendor=draw.choice(("nvidia", "amd")),
                interface="ib0",
                gang_ports=[29500, 29599],
                labels={"rack": draw.choice("xyz"), 'a"b.c': "é"},
                resources={"net": draw.choice((1, 2.5))},
                confine=draw.choice(("off", "try", "must")),
                writable=["/data", "~/.cache"],
                gpus=[group(number_of * 20, number) for number_of in range(draw.randint(1, 3))],
            ),
        }
        for number in range(draw.randint(1, 4))
    ]
    names = [server["name"] for server in servers]
    return {
        "servers": servers,
        **some(
            cluster=some(
                policy=draw.choice(sorted(POLICIES)),
                order=draw.choice(sorted(ORDERS)) + draw.choice(("", "+backfill")),
                max_gpus=draw.randint(4, 8),
                min_gpus=draw.randint(0, 4),
                lease_ttl=draw.choice((60, "3d", 0.5)),
                rogue="ignore",
                confine=draw.choice(("off", "try", "must")),
                writable=["/scratch", "~"],
                idle_below=draw.choice((0, 50.5)),
                prices={"A": 2.5, "H 100": 4.0},
            ),
            teams={
                f"t {number}": {
                    "guaranteed": 0,
                    **some(limit=5, weight=0.5, max_runtime="3d", idle_below=7.0),
                }
                for number in range(draw.randint(1, 3))
            },
            preemption=True,
            gpu_weights={"A": 2.0},
            maintenance=[
                {**WINDOW, "servers": draw.sample(names, draw.randint(1, len(names))), "reason": reason}
                for reason in draw.sample(['new "fans"', "", "é\n"], draw.randint(1, 2))
                if reason.isprintable()
            ],
            health={"xid 63": "note", "gpu lost": {"action": "ignore", "todo": "look"}},
        ),
    }


@pytest.mark.thorough
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_what_is_printed_is_no_change_and_gives_an_empty_store_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    draw = random.Random(seed)
    manager = GPUResourceManager(Settings(store="memory://"), store=MemoryStore(), inventory=nodes("ab"))
    for _ in range(2):  # whatever was there before
        wanted = form(**random_sections(draw))
        manager.apply(wanted, ApplyOptions(remove=() if wanted.maintenance else ("maintenance",)))
        assert not manager.diff(wanted)["changed"]
    printed = manager.cluster()
    path = tmp_path_factory.mktemp("printed") / "cluster.toml"
    path.write_text(printed["toml"], encoding="utf-8")
    definition = ClusterFiles([path]).definition
    version = manager.snapshot()["version"]
    assert not manager.apply(definition)["changed"]
    assert manager.snapshot()["version"] == version
    assert not manager.apply(form(**printed["sections"]))["changed"]
    other = GPUResourceManager(Settings(store="redis://unused"), store=MemoryStore())
    other.apply(definition)
    assert other.cluster() == printed


def test_labels_are_printed_in_their_order_so_that_all_processes_have_one_revision(
    manager: GPUResourceManager,
) -> None:
    labels = {f"{name}{number}": "x" for number in range(4) for name in ("zone", "rack", "disk")}
    manager.apply(form(servers=[{"name": "a", "cpus": 1, "labels": labels}]))
    server = manager.cluster()["sections"]["servers"][0]
    assert list(server["labels"].items()) == list(labels.items())


# ---- the constructor ----


def test_what_a_constructor_is_told_is_for_an_empty_store_only() -> None:
    store, own = MemoryStore(), Settings(store="redis://unused")
    first = GPUResourceManager(own, store=store, inventory=nodes("ab"), cluster={"policy": "best_fit"})
    version = first.snapshot().get("version", 0)
    again = GPUResourceManager(own, store=store, inventory=nodes("ab"), cluster={"policy": "best_fit"})
    assert again.snapshot().get("version", 0) == version
    for told, said in (
        ({"cluster": {"policy": "fgd"}}, "policy is 'best_fit' in the store, not 'fgd': gpu-manager apply"),
        ({"inventory": nodes("a")}, r"another inventory \(- server b\): gpu-manager apply changes it"),
    ):
        with pytest.raises(SettingsError, match=said):
            GPUResourceManager(own, store=store, **told)
    assert first.snapshot().get("version", 0) == version
