"""Every refusal has a kind and one sentence, and is true of the state: free capacity is never denied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import (
    Drained,
    GpuClosed,
    Granted,
    Queued,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request, Utility
from resource_manager.core.names import MAX_SHOWN, name_of, short, short_id
from resource_manager.core.refusal import RecoveryWindow, RefusalKind, recovering
from resource_manager.manager.refusal_wording import (
    MAX_DETAIL,
    Refusal,
    detail_of,
    lock_busy,
    reasons_of,
    refusal_of,
)
from resource_manager.rest.problems import from_refusal
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.backfill import MAX_AHEAD
from resource_manager.scheduling.queue.orders import QueueDiscipline, get_order
from resource_manager.scheduling.queue.price_admission import PriceAdmission
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.reasons.feasibility import explain, refusals_of, standings
from resource_manager.scheduling.scheduling_pass import NO_LIMITS, Limits, SchedulingPass

FIRST_FIT = get_policy("first_fit")
FIFO = get_order("fifo")


def server(name: str, number: int, gpus: int = 8, gpu_type: str = "", cpus: int = 64) -> Node:
    return Node(name, number, {"cpus": cpus}, tuple(Gpu(i, gpu_type) for i in range(gpus)))


def cluster_of(*nodes: Node) -> ClusterState:
    return ClusterState(nodes)


def hold(cluster: ClusterState, task_id: str, node: str, gpus: int, cpus: int = 1, milli: int = 1000) -> None:
    state = cluster.by_name[node]
    request = Request(task_id, gpus, milli, {"cpus": cpus})
    placement = Placement(node, state.pick_gpus(request))
    cluster.apply(Granted(Lease(request, (placement,), cluster.last_fencing_token + 1, 0.0), 0.0))


def reason(
    cluster: ClusterState,
    request: Request,
    order: QueueDiscipline = FIFO,
    window: RecoveryWindow | None = None,
    limits: Limits = NO_LIMITS,
) -> tuple[str, str]:
    before = cluster.snapshot()
    refusal = refusals_of(
        cluster,
        [request],
        SchedulingPass(FIRST_FIT, order, 10.0, recovering(window) if window else None, limits),
    )[request.lease_id]
    assert cluster.snapshot() == before
    assert str(refusal_of(refusal)) == detail_of(refusal)
    return str(refusal.kind), detail_of(refusal)


def test_no_capacity_names_the_server_with_most_gpus_free() -> None:
    cluster = cluster_of(server("s1", 1, 4, "A100"), server("s2", 2, 4, "A100"), server("v", 3, 8, "V100"))
    hold(cluster, "a", "s1", 2)
    hold(cluster, "b", "s2", 1)
    asked = Request("t", 4, gpu_types=("A100",))
    assert reason(cluster, asked) == ("no_capacity", "no server with 4 A100: largest free is 3 on s2")
    hold(cluster, "c", "s2", 3)
    hold(cluster, "d", "s1", 2)
    assert reason(cluster, Request("t", 1, gpu_types=("A100", "H100"))) == (
        "no_capacity",
        "no server with 1 A100 or H100: none is free anywhere",
    )


def test_no_capacity_names_the_short_resource_besides_gpus() -> None:
    cluster = cluster_of(server("s1", 1), server("s2", 2))
    hold(cluster, "a", "s1", 7, 1)
    hold(cluster, "b", "s2", 1, 60)
    assert reason(cluster, Request("t", 4, resources={"cpus": 8})) == (
        "no_capacity",
        "no server with 4 GPUs and 8 CPUs: the most CPUs free is 4 on s2",
    )
    assert reason(cluster, Request("t", 4, resources={"cpus": 8}, required_node="s1")) == (
        "no_capacity",
        "s1 cannot fit 4 GPUs and 8 CPUs now: 1 free",
    )
    assert reason(cluster, Request("t", resources={"cpus": 64})) == (
        "no_capacity",
        "no server with 64 CPUs: the most CPUs free is 63 on s1",
    )


def test_required_labels_are_named() -> None:
    far = replace(server("s1", 1), labels={"zone": "a"})
    cluster = cluster_of(far, replace(server("s2", 2), labels={"zone": "b", "rack": "7"}))

    def asked(gpus: int, node: str | None = None, **labels: str) -> tuple[str, str]:
        return reason(cluster, Request("t", gpus, labels_required=labels, required_node=node))

    assert asked(1, zone="c") == ("never_fits", "no server has zone=c as its label")
    assert asked(1, zone="a", rack="7") == ("never_fits", "no server has zone=a and rack=7 as its labels")
    assert asked(1, "s2", zone="a") == ("never_fits", "s2 lacks the label zone=a")
    assert asked(9, zone="a") == (
        "never_fits",
        "of the servers with zone=a: no server could ever satisfy 9 GPUs: the largest, s1, has 8",
    )
    hold(cluster, "h", "s1", 6)
    assert asked(4, zone="a") == (
        "no_capacity",
        "of the servers with zone=a: no server with 4 GPUs: largest free is 2 on s1",
    )
    labelled = Request("t", 1, labels_required={"zone": "a"})
    verdicts = explain(cluster, labelled)
    assert [reasons_of(verdict.reasons, labelled) for verdict in verdicts] == [
        [],
        ["the request is for servers with zone=a only"],
    ]


def test_no_capacity_for_a_gpu_fraction_names_the_most_milli_free() -> None:
    cluster = cluster_of(server("s1", 1, 1), server("s2", 2, 1))
    hold(cluster, "a", "s1", 1)
    hold(cluster, "b", "s2", 1, milli=750)
    assert reason(cluster, Request("t", 1, 500)) == (
        "no_capacity",
        "no GPU with 500 milli free: the most free is 250 milli on s2",
    )


def test_free_but_reserved_capacity_names_the_request_ahead() -> None:
    cluster = cluster_of(server("gpu-server-0", 0))
    hold(cluster, "runs", "gpu-server-0", 6)
    cluster.apply(Queued(Request("train_a", 6), 1.0, 1, 1.0))
    assert reason(cluster, Request("t", 1)) == (
        "behind_queue",
        "2 GPUs are free on gpu-server-0; reserved for train_a vnpm (position 1, needs 6), "
        "first come, first served",
    )
    cluster.apply(Queued(Request("t", 2), 2.0, 2, 2.0))
    head, second = standings(cluster, SchedulingPass(FIRST_FIT, get_order("priority"), 10.0))
    assert (head.position, refusal_of(head.refusal)) == (
        1,
        Refusal(RefusalKind.NO_CAPACITY, "no server with 6 GPUs: largest free is 2 on gpu-server-0"),
    )
    assert detail_of(second.refusal).endswith(
        "(position 1, needs 6), by priority, then first come, first served"
    )


def test_a_server_that_never_fits_the_request_ahead_is_not_called_reserved() -> None:
    cluster = cluster_of(server("big", 0), server("small", 1, 1))
    hold(cluster, "runs", "big", 8)
    cluster.apply(Queued(Request("train_a", 6), 1.0, 1, 1.0))
    assert reason(cluster, Request("t", 1)) == (
        "behind_queue",
        "1 GPU is free on small; train_a vnpm (position 1, needs 6) is ahead, first come, first served",
    )


def test_under_backfill_the_reason_names_the_delayed_request_and_the_remedy() -> None:
    cluster = cluster_of(server("s1", 1))
    request = Request("runs", 6, expected_runtime_s=100.0)
    cluster.apply(Granted(Lease(request, (Placement("s1", tuple(range(6))),), 1, 0.0), 0.0))
    cluster.apply(Queued(Request("train_a", 8, expected_runtime_s=50.0), 1.0, 1, 1.0))
    order = get_order("fifo+backfill")
    assert reason(cluster, Request("t", 2), order) == (
        "behind_queue",
        "2 GPUs are free on s1; starting now could delay train_a vnpm (position 1, needs 8), because its "
        "runtime is unknown: state expected_runtime",
    )
    assert reason(cluster, Request("t", 2, expected_runtime_s=500.0), order)[1].endswith("needs 8)")
    short_one = Request("t", 2, expected_runtime_s=60.0)
    assert allocator.allocate_in_order(cluster, [short_one], SchedulingPass(FIRST_FIT, order, 10.0))


def backfilled(*leases: Lease, head: Request | None = None) -> ClusterState:
    """A server with those leases and a pending request that does not fit, under backfill."""
    cluster = cluster_of(server("s1", 1), server("small", 2, 1))
    for lease in leases:
        cluster.apply(Granted(lease, 0.0))
    cluster.apply(Queued(head or Request("train_a", 6, expected_runtime_s=50.0), 1.0, 1, 1.0))
    return cluster


def lease(task_id: str, first: int, count: int, token: int, runtime_s: float | None) -> Lease:
    request = Request(task_id, count, expected_runtime_s=runtime_s)
    return Lease(request, (Placement("s1", tuple(range(first, first + count))),), token, 0.0)


def test_no_runtime_is_asked_for_where_none_would_help() -> None:
    order = get_order("priority+backfill")
    cluster = backfilled(lease("known", 0, 1, 1, 100.0), lease("a", 1, 4, 2, None))
    said = (
        "behind_queue",
        "3 GPUs are free on s1; train_a vnpm (position 1, needs 6) may start at any moment: the runtime of "
        "lease a bbbb is unknown, so nothing overtakes it",
    )
    brief = Request("t", 2, expected_runtime_s=1.0)
    assert reason(cluster, Request("t", 2), order) == reason(cluster, brief, order) == said
    assert not allocator.allocate_in_order(cluster, [brief], SchedulingPass(FIRST_FIT, order, 10.0))


def test_a_pending_request_without_a_runtime_may_be_the_obstacle() -> None:
    order = get_order("fifo+backfill")
    cluster = backfilled(lease("a", 0, 4, 1, 100.0), head=Request("train_a", 6))
    cluster.apply(Queued(Request("train_b", 8, expected_runtime_s=5.0), 2.0, 2, 2.0))
    brief = Request("t", 2, expected_runtime_s=1.0)
    assert reason(cluster, brief, order)[1] == (
        "4 GPUs are free on s1; train_b f462 (position 2, needs 8) may start at any moment: the runtime of "
        "train_a vnpm is unknown, so nothing overtakes it"
    )
    assert not allocator.allocate_in_order(cluster, [brief], SchedulingPass(FIRST_FIT, order, 10.0))


@pytest.mark.parametrize("waiting", [MAX_AHEAD - 2, MAX_AHEAD - 1])
def test_only_so_many_that_wait_for_the_same_servers_are_overtaken(waiting: int) -> None:
    """The head waits, too; with one less in the queue the request starts."""
    order = get_order("fifo+backfill")
    cluster = backfilled(lease("a", 0, 4, 1, 100.0))
    for number in range(waiting):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=5.0), 2.0, number, 2.0))
    brief = Request("t", 2, expected_runtime_s=1.0)
    last = f"w{MAX_AHEAD - 2} {short_id(MAX_AHEAD - 2)} (position {MAX_AHEAD}, needs 8)"
    assert reason(cluster, brief, order)[1] == "4 GPUs are free on s1; " + (
        f"nothing overtakes {last}: {MAX_AHEAD} wait for the same servers"
        if waiting == MAX_AHEAD - 1
        else "it fits by now, ask again"
    )
    starts = allocator.allocate_in_order(cluster, [brief], SchedulingPass(FIRST_FIT, order, 10.0))
    assert bool(starts) == (waiting < MAX_AHEAD - 1)


def test_no_runtime_is_asked_for_where_the_head_starts_once_an_overdue_job_ends() -> None:
    order = get_order("fifo+backfill")
    cluster = backfilled(lease("overdue", 0, 6, 1, 5.0), head=Request("train_a", 8, expected_runtime_s=5.0))
    assert reason(cluster, Request("t", 2), order)[1] == (
        "2 GPUs are free on s1; starting now could delay train_a vnpm (position 1, needs 8)"
    )


def test_the_short_resource_of_the_request_ahead_is_named() -> None:
    cluster = cluster_of(server("s1", 1, cpus=32))
    hold(cluster, "runs", "s1", 2, 8)
    cluster.apply(Queued(Request("train_a", 2, resources={"cpus": 30}), 1.0, 1, 1.0))
    assert reason(cluster, Request("t", 1, resources={"cpus": 1}))[1] == (
        "6 GPUs are free on s1; reserved for train_a vnpm (position 1, needs 2 GPUs and 30 CPUs), first come"
        ", first served"
    )
    hold(cluster, "more", "s1", 5, 8)
    assert "(position 1, needs 2), " in reason(cluster, Request("t", 1, resources={"cpus": 1}))[1]


def test_a_utility_that_does_not_exceed_the_price() -> None:
    cluster = cluster_of(server("s1", 1))
    hold(cluster, "a", "s1", 4, 32)
    limits = Limits(PriceAdmission(1.0, 100.0))
    asked = Request("t", 4, resources={"cpus": 32}, expected_runtime_s=3600.0, utility=Utility(16.0, 7200.0))
    assert reason(cluster, asked, limits=limits) == ("price", "utility 8 does not exceed the price 10 on s1")


def test_a_recovery_window_and_a_busy_lock_are_not_called_no_capacity() -> None:
    window = RecoveryWindow(12.0, 48.0)
    said = (
        "the store restarted or was restored 12 s ago; grants resume in 48 s (until then the owners of "
        "leases renew them)"
    )
    cluster = cluster_of(server("s1", 1))
    assert reason(cluster, Request("t", 2), window=window) == ("recovering", said)
    assert recovering(window).retry_after_s == 48.0
    assert reason(cluster, Request("t", 9), window=window)[0] == "never_fits"
    assert lock_busy(60.0) == Refusal(
        RefusalKind.LOCK_BUSY, "the lock was busy for 60 s; nothing was changed, try again"
    )


def test_a_request_that_the_next_pass_grants_says_so() -> None:
    cluster = cluster_of(server("s1", 1))
    cluster.apply(Queued(Request("t", 2), 1.0, 1, 1.0))
    (standing,) = standings(cluster, SchedulingPass(FIRST_FIT, FIFO, 2.0))
    assert detail_of(standing.refusal) == (
        "8 GPUs are free on s1; no request is ahead: granted at the next pass over the queue, within seconds"
    )


def test_a_sentence_stays_short_for_long_names() -> None:
    names = tuple(f"{i}" * 250 for i in range(50))
    cluster = cluster_of(server("s" * 500, 1, 2))
    request = Request("t", 4, gpu_types=names, resources=dict.fromkeys(names, 1))
    assert len(reason(cluster, request)[1]) <= MAX_DETAIL
    cluster.apply(Queued(Request("q" * 1000, 2), 1.0, 1, 1.0))
    hold(cluster, "a", "s" * 500, 1)
    assert len(reason(cluster, Request("t", 1))[1]) <= MAX_DETAIL
    cluster = cluster_of(*(server(f"{number}" * 300, number) for number in range(4)))
    for number in range(4):
        cluster.apply(Drained(f"{number}" * 300, 0.0, "r" * 300))
    detail = reason(cluster, Request("t", 1))[1]
    assert MAX_DETAIL - 10 < len(detail) <= MAX_DETAIL
    assert from_refusal(Refusal(RefusalKind.MAINTENANCE, detail)).detail == detail, "REST cuts nothing more"
    assert short("a" * 500 + "b").endswith("b")
    assert len(short("x" * 500)) < MAX_SHOWN


KINDS = st.sampled_from(["", "A100", "V100"])
ORDERS = st.sampled_from(["fifo", "priority", "srtf", "fifo+backfill", "priority+backfill", "fair_share"])


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    kind = draw(KINDS)
    milli = draw(st.sampled_from([1000, 1000, 1000, 250]))
    return Request(
        name,
        1 if milli < 1000 else draw(st.integers(0, 4)),
        milli,
        {"cpus": draw(st.integers(1, 8))},
        gpu_types=(kind,) if kind else (),
        priority=draw(st.integers(0, 2)),
        expected_runtime_s=draw(st.sampled_from([None, 10.0, 1000.0])),
    )


def serve(cluster: ClusterState, order: QueueDiscipline) -> None:
    for change in allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, order, 30.0)):
        cluster.apply(change)


@given(st.data(), ORDERS)
def test_every_reason_is_true_of_the_state(data: st.DataObject, name: str) -> None:
    """After a pass over the queue each pending request has a true reason, and so has one not yet queued."""
    order = get_order(name)
    cluster = cluster_of(
        server("a", 0, 4, "A100", 16), server("v", 1, 2, "V100", 8), server("w", 2, 4, "V100")
    )
    for number in range(data.draw(st.integers(0, 10))):
        request = data.draw(requests(f"t{number}"))
        if never_fits(cluster, request) is None:
            for change in allocator.submit(cluster, request, SchedulingPass(FIRST_FIT, order, float(number))):
                cluster.apply(change)
    if data.draw(st.booleans()):
        cluster.apply(Drained(data.draw(st.sampled_from("avw")), 20.0, "fan"))
        serve(cluster, order)
    if data.draw(st.booleans()):
        node = data.draw(st.sampled_from("avw"))
        for gpu_id in data.draw(st.sets(st.integers(0, 3))):
            cluster.apply(GpuClosed(node, gpu_id, "", "xid 79", 20.0))
        serve(cluster, order)
    asking = data.draw(requests("asks"))
    refused = refusals_of(cluster, [asking], SchedulingPass(FIRST_FIT, order, 30.0))["asks"]
    cluster.apply(Queued(asking, 30.0, 1, 30.0))
    serve(cluster, order)
    seen = list(standings(cluster, SchedulingPass(FIRST_FIT, order, 30.0)))
    assert [standing.entry for standing in seen] == order(cluster, 30.0)
    for standing in seen:
        request, kind = standing.entry.request, standing.refusal.kind
        room = [state for state in cluster.nodes if state.fits(request)]
        open_and_able = [s for s in cluster.nodes if s.is_open and s.could_fit(request)]
        if kind is RefusalKind.NO_CAPACITY:
            assert open_and_able
            assert not room
        elif kind is RefusalKind.BEHIND_QUEUE:
            assert room
            assert standing.position > 1, "no request is ahead of the first"
            assert any(f"{name_of(other.entry)} (position" in detail_of(standing.refusal) for other in seen)
        elif kind is RefusalKind.MAINTENANCE:
            assert not open_and_able
            assert "drained: fan" in detail_of(standing.refusal) or "is closed: xid 79" in detail_of(
                standing.refusal
            )
        else:
            assert kind is RefusalKind.NEVER_FITS
            assert never_fits(cluster, request) is not None
        if request is asking:
            assert standing.refusal == refused
