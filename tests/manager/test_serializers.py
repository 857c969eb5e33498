"""Plain dictionaries for callers: the original's keys, and figures that add up."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import Drained, InventoryChanged, Quarantined, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.core.refusal import NotEstimated
from resource_manager.manager import answer_words, explanations, serializers, server_views
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.manager.results import Explanation
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.reasons.start_estimates import Start
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests import builders
from tests.builders import nodes

FIRST_FIT = get_policy("first_fit")
FIFO = get_order("fifo")
hold = partial(builders.hold, at=10.0)


def test_an_allocation_has_the_keys_of_the_original_and_one_member() -> None:
    gpus = tuple(Gpu(i, "A100", "amd", 80_000) for i in range(4))
    cluster = ClusterState([Node("box", 7, {"cpus": 16}, gpus, address="ada@box")])
    allocation = serializers.allocation(
        cluster, hold(cluster, Request("t", 2, resources={"cpus": 3}), "box", 1, 3)
    )
    original = {
        "server_id": 7,
        "server_name": "box",
        "gpu_ids": [1, 3],
        "cpu_count": 3,
        "gpu_devices": "1,3",
        "task_id": "t",
    }
    assert allocation.items() >= original.items()
    assert (allocation["address"], allocation["vendor"], allocation["gpu_memory_mib"]) == (
        "ada@box",
        "amd",
        80_000,
    )
    assert (allocation["expires_at"], allocation["state"]) == (None, "RUNNING")
    [member] = allocation["members"]
    only_of_members = {
        "rank": 0,
        "gpu_uuids": [],
        "mps_folder": "",
        "user": "",
        "confine": "off",
        "writable": [],
        "port": 0,
        "interface": "",
        "job_user": "",
    }
    same = member.keys() - only_of_members.keys()
    shared = {key: value for key, value in allocation.items() if key in same}
    assert dict(member) == shared | only_of_members
    assert json.loads(json.dumps(allocation)) == allocation


def test_a_fraction_has_its_part_of_the_smallest_memory() -> None:
    cluster = ClusterState([Node("a", 0, {}, (Gpu(0, memory_mib=10_001),)), Node("b", 1, {}, (Gpu(0),))])
    assert (
        serializers.allocation(cluster, hold(cluster, Request("t", 1, 333), "a", 0))["gpu_memory_mib"] == 3330
    )
    assert serializers.allocation(cluster, hold(cluster, Request("u", 1), "b", 0))["gpu_memory_mib"] == 0, (
        "unknown"
    )


def test_a_lease_without_gpus_has_the_vendor_of_its_server_and_empty_devices() -> None:
    cluster = ClusterState([Node("a", 0, {"cpus": 4}, vendor="amd")])
    allocation = serializers.allocation(
        cluster, hold(cluster, Request("t", resources={"cpus": 1}), "a", ends=70.0)
    )
    assert (allocation["vendor"], allocation["gpu_ids"], allocation["gpu_devices"]) == ("amd", [], "")
    assert (allocation["expires_at"], allocation["gpu_memory_mib"]) == (70.0, 0)


def test_a_lease_and_a_queue_entry_say_how_it_stands_with_a_task() -> None:
    cluster = ClusterState(nodes("a"))
    hold(cluster, Request("running", 2), "a", 0, 1)
    cluster.apply(Quarantined("running", 1, 60.0))
    for number, name in enumerate(("first", "second")):
        cluster.apply(Queued(Request(name, 1, team="vision"), 20.0, number, 20.0))

    current = SchedulingPass(FIRST_FIT, FIFO, 25.0)
    running = serializers.allocation(cluster, cluster.leases["running"])
    second = serializers.queue_entry(cluster, "second", current)
    assert (running["state"], running["quarantined"]) == ("ERROR", True)
    assert (second["state"], second["position"], second["kind"], second["waited_s"]) == (
        "WAITING",
        2,
        "awaiting_release",
        5.0,
    )
    assert second["team"] == "vision"
    assert serializers.queue(cluster, current) == [serializers.queue_entry(cluster, "first", current), second]


def test_a_wait_is_not_negative_if_the_clock_was_set_back() -> None:
    cluster = ClusterState(nodes("a", 0))
    cluster.apply(Queued(Request("t", 1), 20.0, 1, 20.0))
    [entry] = serializers.queue(cluster, SchedulingPass(FIRST_FIT, FIFO, 15.0))
    assert entry["waited_s"] == 0.0


def test_the_states_of_a_server() -> None:
    cluster = ClusterState(nodes("abcdef", 2))
    hold(cluster, Request("t", 1, 100), "b", 0)
    hold(cluster, Request("u", 2), "c", 0, 1)
    cluster.apply(Drained("d", 1.0, "fan"))
    cluster.apply(Drained("e", 1.0, failed=True))
    hold(cluster, Request("lost", 1), "f", 0)
    cluster.apply(Quarantined("lost", cluster.last_fencing_token, 2.0))
    assert [server_views.server_state(cluster.by_name[name]) for name in "abcdef"] == [
        "IDLE",
        "PARTIAL",
        "FULL",
        "DRAINED",
        "ERROR",
        "ERROR",
    ]
    bare = ClusterState([Node("bare", 0, {"cpus": 1})])
    hold(bare, Request("t", resources={"cpus": 1}), "bare")
    assert server_views.server_state(bare.by_name["bare"]) == "PARTIAL", "FULL is said of GPUs"


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.sampled_from([300, 1000]), st.integers(0, 5)),
        max_size=5,
    ),
    st.sets(st.sampled_from("ab")),
    st.booleans(),
)
def test_free_used_and_closed_add_up_for_every_server(
    held: list[tuple[str, int, int, int]], drained: set[str], shrinks: bool
) -> None:
    cluster = ClusterState(nodes("ab"))
    for number, (on, gpus, milli, cpus) in enumerate(held):
        request = Request(f"t{number}", gpus, milli if gpus == 1 else 1000, {"cpus": cpus})
        if cluster.by_name[on].fits(request):
            hold(cluster, request, on, *(cluster.by_name[on].pick_gpus(request) or ()))
    for name in drained:
        cluster.apply(Drained(name, 1.0))
    if shrinks:
        cluster.apply(InventoryChanged(nodes("a", 1, 2), 2.0))
    rows: list[Any] = [*server_views.summary(cluster)["servers"]]
    for row in rows:
        state = cluster.by_name[row["server_name"]]
        for usage, kind in ((server_views.gpu_usage(state), "gpus"), (server_views.cpu_usage(state), "cpus")):
            assert usage.free + usage.used + usage.closed == usage.total
            assert (row[f"available_{kind}"], row[f"closed_{kind}"], row[f"total_{kind}"]) == (
                usage.free,
                usage.closed,
                usage.total,
            )
            assert usage.free >= 0
            assert usage.closed >= 0
            assert state.is_open or usage.free == 0
        assert row["running_tasks"] == len(state.leases)
        assert all(milli == 0 for milli in row["free_gpu_milli"].values()) or state.is_open


def test_a_summary_counts_what_the_state_has() -> None:
    cluster = ClusterState(nodes("ab", 4))
    hold(cluster, Request("t", 1, 500), "a", 0)
    cluster.apply(Queued(Request("w", 9), 1.0, 1, 1.0))
    summary = server_views.summary(cluster)
    counted = {key: summary[key] for key in ("total_servers", "leases", "queue_length", "version")}
    assert counted == {"total_servers": 2, "leases": 1, "queue_length": 1, "version": 2}
    first = summary["servers"][0]
    assert (first["available_gpus"], first["gpu_utilization"], first["cpu_utilization"]) == (
        3,
        "12.5%",
        "0.0%",
    )
    assert first["free_gpu_milli"] == {"0": 500, "1": 1000, "2": 1000, "3": 1000}


def test_an_explanation_agrees_with_the_allocator_and_has_every_server() -> None:
    cluster = ClusterState(nodes("ab"))
    hold(cluster, Request("t", 2), "a", 0, 1)

    def explain(request: Request) -> Explanation:
        before = cluster.snapshot()
        answer = explanations.explanation(cluster, request, SchedulingPass(FIRST_FIT, FIFO, 5.0))
        assert cluster.snapshot() == before
        return answer

    fits = explain(Request("u", 2))
    assert (fits["would_be_granted"], fits["server_name"], fits["gpu_ids"]) == (True, "b", [0, 1])
    assert (fits["kind"], fits["reason"]) == (None, "")
    assert explain(Request("t", 1))["reason"] == "the task has a lease already"
    never = explain(Request("u", 3))
    assert (never["would_be_granted"], never["kind"], never["could_ever_fit"]) == (False, "never_fits", False)
    servers = never["servers"]
    assert isinstance(servers, list)
    assert [(row["server_name"], row["fits"], bool(row["reasons"])) for row in servers] == [
        ("a", False, True),
        ("b", False, True),
    ]


def test_an_estimate_has_a_time_or_a_reason() -> None:
    known = serializers.estimate(Start(99.0, "a", None, 90.0, None, "t", 7, 120.0), "calibrated")
    assert known == {
        "at": 99.0,
        "earliest": 90.0,
        "latest": None,
        "after": "t",
        "plays": 7,
        "ends_by": 120.0,
        "server_name": "a",
        "confidence": "calibrated",
        "detail": "",
    }
    assert serializers.interval_in_words(known, 30.0) == "after more than 60 s, calibrated, 7 plays only"
    assert serializers.interval_in_words({**known, "latest": 330.0, "plays": 40}, 30.0) == (
        "60 s to 5 min, calibrated"
    )
    one = {**known, "plays": 1, "confidence": "few data"}
    assert serializers.interval_in_words(one, 30.0) == (
        "from one simulated course: the interval is not known"
    )
    unknown = serializers.estimate(Start(None, why=NotEstimated()))
    assert (unknown["at"], unknown["confidence"]) == (None, "unknown")
    assert unknown["detail"] == detail_of(NotEstimated())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (3569, "59 min"),
        (3570, "1.0 h"),
        (3600, "1.0 h"),
        (86_219, "23.9 h"),
        (86_220, "1.0 d"),
        (86_400, "1.0 d"),
    ],
)
def test_a_duration_is_told_in_its_own_unit(seconds: float, text: str) -> None:
    assert answer_words.duration(seconds) == text


def test_words_for_people() -> None:
    assert server_views.usage_in_words(server_views.Usage(4, 2, 8)) == "4 free, 2 used, 2 closed of 8"
