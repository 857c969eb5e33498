"""One caller's flood of calls: batches, long queues, keys; the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from flask.testing import FlaskClient

from benchmarks.floods import ATTACKS, CALLS, Service, fill_queue, hold, lease, measure, quantile
from resource_manager import GPUResourceManager, MemoryStore, Refusal, Settings
from resource_manager.core.cluster import ClusterState
from resource_manager.manager import forecasts, queue_view
from resource_manager.manager.commit import group, group_commits
from resource_manager.manager.report import Accounts
from resource_manager.rest import limits, tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.console import use_page
from resource_manager.rest.http_server import ApartDispatcher
from resource_manager.rest.limits import Limits
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.service import Service as RestService
from resource_manager.rest.tokens import Role
from resource_manager.scheduling.queue.windows import place_now
from resource_manager.scheduling.reasons import start_estimates
from tests.builders import Clock
from tests.eventually import wait_for

AsRole = Callable[..., FlaskClient]
ONE = {"required_gpus": 2, "required_cpus": 1}

NOBODY_WAITS_S = 2.0
"""Bound on a busy machine with two cores; docs/security.md has the figures of a quiet one."""


@pytest.mark.e2e
@pytest.mark.parametrize("attack", ATTACKS[1:], ids=lambda attack: attack.name)
def test_a_flood_of_one_caller_delays_no_call_of_another(attack: Any) -> None:
    """Before, renewals beside 24 connections with batches timed out, as did health beside readers."""
    with ExitStack() as stack:
        service = Service(stack)
        root = stack.enter_context(service.client("root-2", Role.OPERATOR))
        ada = stack.enter_context(service.client("ada", Role.USER, timeout_s=20.0))
        hold(root)
        leases = lease(ada, 100)
        fill_queue(root, attack, most=200)
        with service.attacked(attack):
            taken = measure(ada, leases, 5.0)
            began = time.monotonic()
            for path in ("/healthz", "/metrics"):
                ada.get(path).raise_for_status()
            assert time.monotonic() - began < 2 * NOBODY_WAITS_S
    assert all(quantile(taken[call], 0.99) < 1000 * NOBODY_WAITS_S for call in CALLS), taken


# ---- calls ----


def test_each_item_of_a_batch_counts_as_a_call(manager: GPUResourceManager, kept: Persistence) -> None:
    service = standalone(manager, kept, rate="10/hour")
    eve = limits.Limits("10/hour")
    eve.count("eve", 1)
    eve.count("eve", 30)  # the calls after a batch pay for it
    with pytest.raises(ProblemError) as caught:
        eve.count("eve")
    assert caught.value.status == 429
    assert int(caught.value.headers["Retry-After"]) > 2 * 3600
    eve.count("ada")
    service.watch.close()


def test_a_batch_takes_the_rate_of_its_caller_only(
    manager: GPUResourceManager, kept: Persistence, request: pytest.FixtureRequest
) -> None:
    service = standalone(manager, kept, rate="10/hour")
    request.addfinalizer(service.watch.close)
    app = create_app(service)

    def post(name: str, path: str, body: Any) -> Any:
        text = made.setdefault(name, "") or tokens.create(kept.tokens, name, Role.USER)
        made[name] = text
        return app.test_client().post(path, json=body, headers={"Authorization": f"Bearer {text}"})

    made: dict[str, str] = {}
    batch = {"requests": [{"task_id": f"t{number}", **ONE} for number in range(16)]}
    assert post("eve", "/api/allocate/batch", batch).status_code == 200
    refused = post("eve", "/api/renew", {"task_id": "t0"})
    assert (refused.status_code, refused.headers["Retry-After"].isdecimal()) == (429, True)
    assert post("ada", "/api/allocate", {"task_id": "a", **ONE}).status_code == 503  # full, not limited


def test_one_caller_has_a_quarter_of_the_threads() -> None:
    limits_of = Limits(threads=16)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(limits_of.running("caller eve"))
        with pytest.raises(ProblemError) as caught, limits_of.running("caller eve"):
            pass
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "0")
        stack.enter_context(limits_of.running("caller ada"))
    for _ in range(5):
        with limits_of.running("caller eve"):
            pass


def test_calls_of_a_caller_that_wait_for_agents_leave_room_for_those_that_do_not() -> None:
    limits_of = Limits(threads=16)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limits_of.running("caller eve", waits=True))
        with pytest.raises(ProblemError) as caught, limits_of.running("caller eve", waits=True):
            pass
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "0")
        with limits_of.running("caller eve"):
            pass
        stack.enter_context(limits_of.running("caller ada", waits=True))


def test_calls_with_threads_of_their_own_leave_half_of_these_to_others() -> None:
    limits_of = Limits(threads=16)
    for path in ("/api/renew", "/api/reports"):
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(limits_of.running("caller eve", path=path))
            with pytest.raises(ProblemError) as caught, limits_of.running("caller eve", path=path):
                pass
            assert caught.value.status == 429
            stack.enter_context(limits_of.running("caller ada", path=path))


def test_whose_reads_have_all_their_threads_renews_all_the_same(
    manager: GPUResourceManager, kept: Persistence, request: pytest.FixtureRequest
) -> None:
    service = standalone(manager, kept)
    request.addfinalizer(service.watch.close)
    headers = {"Authorization": f"Bearer {tokens.create(kept.tokens, 'ada', Role.USER)}"}
    client = create_app(service).test_client()
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(service.limits.running("caller ada"))
        statuses = [
            client.post(f"/api/{path}", json=body, headers=headers).status_code
            for path, body in (("allocate", {"task_id": "t", **ONE}), ("renew", {"task_id": "t"}))
        ]
    assert statuses == [429, 404]


class SlowManager(GPUResourceManager):
    """Manager that has the queue read once `end` is set."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.begun, self.end = threading.Semaphore(0), threading.Event()

    def queue(self, *given: Any, **more: Any) -> list[Any]:
        self.begun.release()
        self.end.wait(30)
        return super().queue(*given, **more)


@pytest.mark.parametrize("manager_class", [SlowManager])
def test_calls_beyond_the_quarter_are_refused_while_the_others_run(
    manager: SlowManager, as_role: AsRole
) -> None:
    begun, end = manager.begun, manager.end
    eve, ada = as_role(Role.READER, "eve"), as_role(Role.USER, "ada")
    calls = [threading.Thread(target=eve.get, args=("/api/queue",)) for _ in range(4)]
    for call in calls:
        call.start()
        assert begun.acquire(timeout=30)
    assert eve.get("/api/queue").status_code == 429
    assert ada.post("/api/allocate", json={"task_id": "t", **ONE}).status_code == 200
    assert as_role(None).get("/healthz").status_code == 200
    end.set()
    for call in calls:
        call.join()
    assert eve.get("/api/queue").status_code == 200


def test_what_is_announced_after_other_tasks_is_short(as_role: AsRole) -> None:
    """Each process that opens the store reads all of it, for a week."""
    eve = as_role(Role.USER, "eve")
    for length, status in ((300, 200), (900, 400)):
        after = [f"{number:{length}}".replace(" ", "x") for number in range(50)]
        answer = eve.post("/api/announce", json={"task_id": "run/task", **ONE, "after": after})
        assert answer.status_code == status, answer.text
    assert answer.json is not None
    assert answer.json["errors"][0]["field"] == "after"


# ---- decisions ----


def test_others_are_decided_between_the_parts_of_a_batch() -> None:
    """A batch of a thousand was one decision, and what came meanwhile waited for all of it."""
    sizes: list[int] = []

    class Counting(MemoryStore):
        def commit(self, version: int, changes: Any, **options: Any) -> None:
            sizes.append(len(changes))
            super().commit(version, changes, **options)

    with GPUResourceManager(Settings(store="memory://"), store=Counting()) as manager:
        requests = [{"lease_id": f"t{number}", "gpus": 1, "gpu_milli": 10} for number in range(200)]
        answers = manager.try_allocate_batch(requests)
        assert not any(isinstance(answer, Refusal) for answer in answers)
        assert (max(sizes), sum(sizes)) == (16, 200)


def test_gangs_of_a_batch_are_decided_two_at_a_time() -> None:
    from resource_manager.core.models import Request
    from resource_manager.manager.grants import _next_part

    requests = [Request(f"t{number}", 1, nodes=2 if number < 5 else 1) for number in range(30)]
    assert [len(_next_part(requests, start)) for start in (0, 2, 4, 13)] == [2, 2, 9, 16]


def test_a_group_that_takes_long_is_cut() -> None:
    groups: list[int] = []

    def dear(cluster: ClusterState, now: float) -> list[Any]:
        time.sleep(0.75 * group_commits.MAX_DECISION_S)
        return []

    with GPUResourceManager.from_url("memory://") as manager:
        manager.allocate("t", 2)
        commits = manager._commits
        lead = commits._commits._lead

        def counted(part: list[group.Operation[Any]], deadline: float) -> None:
            lead(part, deadline)
            groups.append(sum(operation.done for operation in part))

        commits._groups._lead = counted
        asked = [
            threading.Thread(target=commits.run, args=(dear, lambda cluster, now: None)) for _ in range(12)
        ]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
    assert sum(groups) == 12
    assert max(groups) <= 2 + 1  # those that begin within the time, and what the clock adds


def test_the_same_request_is_looked_for_once_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from resource_manager.scheduling import allocator

    looked: list[str] = []

    def counting(cluster: ClusterState, request: Any, *more: Any) -> Any:
        looked.append(request.lease_id)
        return place_now(cluster, request, *more)

    monkeypatch.setattr(allocator, "place_now", counting)
    with GPUResourceManager.from_url("memory://") as manager:
        for server in range(4):
            manager.allocate(f"full-{server}", 8)
        looked.clear()
        answers = manager.try_allocate_batch([{"lease_id": f"t{n}", "gpus": 8} for n in range(16)])
    assert all(isinstance(answer, Refusal) for answer in answers)
    assert set(looked) == {"t0"}


def test_a_batch_whose_ids_are_taken_grants_the_others(as_role: AsRole) -> None:
    ada, eve = as_role(Role.USER, "ada"), as_role(Role.USER, "eve")
    ada.post("/api/allocate", json={"task_id": "adas", **ONE})
    batch = {"requests": [{"task_id": name, **ONE} for name in ("x", "adas", "y")]}
    answer = eve.post("/api/allocate/batch", json=batch).json
    assert answer is not None
    assert [each and each["task_id"] for each in answer["results"]] == ["x", None, "y"]
    assert answer["refusals"][1]["kind"] == "task_taken"


# ---- reads ----


def test_no_read_holds_what_decides(service: RestService, as_role: AsRole) -> None:
    """`GET /api/leases` of many leases took the mutex of the commits for as long."""
    manager, inside, end = service.manager, threading.Event(), threading.Event()
    manager.allocate("t", 2)

    def slow(cluster: ClusterState, now: float) -> None:
        inside.set()
        end.wait(30)

    reading = threading.Thread(target=manager.read, args=(slow,))
    reading.start()
    assert inside.wait(30)
    assert manager.renew("t")["task_id"] == "t"
    assert as_role(None).get("/healthz").status_code == 200
    end.set()
    reading.join()


def test_all_who_ask_for_the_queue_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates: list[float] = []
    estimate = start_estimates.forecast_starts
    begun, end = threading.Event(), threading.Event()

    def counting(*args: Any) -> Any:
        estimates.append(0)
        begun.set()
        end.wait(30)
        return estimate(*args)

    monkeypatch.setattr("resource_manager.manager.forecasts.forecast_starts", counting)
    with GPUResourceManager.from_url("memory://") as manager:
        manager.allocate("t", 8, server=0)
        manager.submit("waits", 8, server=0)
        answers: list[Any] = []
        asked = [threading.Thread(target=lambda: answers.append(manager.queue())) for _ in range(16)]
        for thread in asked:
            thread.start()
        assert begun.wait(30)
        assert manager.renew("t")["task_id"] == "t", "nobody waits for the estimates"
        end.set()
        for thread in asked:
            thread.join()
    assert len(estimates) <= 2  # one for each state
    assert [answer[0]["task_id"] for answer in answers] == ["waits"] * 16


class LongHistory(GPUResourceManager):
    """Manager whose accounts take so many seconds of that clock, and are counted."""

    def __init__(self, clock: Clock, cost_s: float) -> None:
        super().__init__(Settings(store="memory://"))
        self.clock, self.cost_s, self.made = clock, cost_s, 0
        self.inside, self.end = threading.Event(), threading.Event()
        self.end.set()

    def accounts(self) -> Accounts:
        self.clock.now += self.cost_s
        self.made += 1
        self.inside.set()
        assert self.end.wait(10)
        return super().accounts()


@pytest.mark.parametrize(("cost_s", "made"), [(2.0, 1), (0.01, 3)])
def test_reports_of_a_long_history_share_one_account(
    clock: Clock, kept: Persistence, cost_s: float, made: int
) -> None:
    """Of 100,000 changes each took ten seconds, four at a time for one reader."""
    with LongHistory(clock, cost_s) as manager:
        service = standalone(manager, kept, open_to="loopback", clock=clock)
        reader = create_app(service).test_client()
        for path in ("/api/report", "/api/report?by=user&since=1d", "/use"):
            assert reader.get(path).status_code == 200
        assert manager.made == made
        clock.now += 60
        reader.get("/api/report")
        assert manager.made == made + 1
        service.watch.close()


def test_pages_share_a_long_list_of_jobs_on_slurm() -> None:
    clock = Clock()

    class Slow(GPUResourceManager):
        def slurm_jobs(self) -> list[Any]:
            clock.now += 1.0
            return []

    with Slow.from_url("memory://") as manager:
        cache = use_page.SlurmCache(clock)
        first = cache.of(manager)
        clock.now += 9.0
        assert cache.of(manager) is first
        clock.now += 2.0
        assert cache.of(manager) is not first


def test_nobody_waits_for_the_account_of_a_long_history_where_there_was_one(clock: Clock) -> None:
    manager, cache = LongHistory(clock, 2.0), use_page.AccountsCache(clock)
    inside, end = manager.inside, manager.end
    first = cache.of(manager)
    inside.clear()
    end.clear()
    clock.now += 21
    making = threading.Thread(target=cache.of, args=(manager,))
    making.start()
    assert inside.wait(10)
    assert cache.of(manager) is first
    end.set()
    making.join()


def test_a_dear_queue_is_kept_for_a_while() -> None:
    clock, computed = Clock(), []
    store = MemoryStore(clock=clock)
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:

        def dear(cluster: ClusterState, now: float) -> list[Any]:
            computed.append(cluster.version)
            ends_at = time.thread_time() + 0.2
            while time.thread_time() < ends_at:
                pass
            return []

        view = queue_view.QueueView(store, dear)
        for _ in range(20):
            manager.drain(0)
            view.entries()
        assert len(computed) == 2, "one may be slow by chance, the second tells"
        clock.now += queue_view.MAX_AGE_S
        view.entries()
        assert len(computed) == 3


def test_one_answer_that_was_slow_by_chance_makes_no_queue_old() -> None:
    store, computed = MemoryStore(clock=Clock()), []
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:

        def slow_once(cluster: ClusterState, now: float) -> list[Any]:
            computed.append(cluster.version)
            ends_at = time.thread_time() + 2 * queue_view.CHEAP_S
            while len(computed) == 1 and time.thread_time() < ends_at:
                pass
            return []

        view = queue_view.QueueView(store, slow_once)
        for _ in range(4):
            manager.drain(0)
            manager.resume(0)
            view.entries()
        assert len(computed) == 4


def test_estimates_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "MAX_ESTIMATE_S", 0.0)
    with GPUResourceManager.from_url("memory://") as manager:
        manager.allocate("t", 8, server=0, expected_runtime=60)
        manager.submit("waits", 8, server=0)
        (entry,) = manager.queue()
    assert entry["estimated_start"]["at"] is None
    assert entry["estimated_start"]["detail"] == "not estimated: the queue is too long for it"


@pytest.mark.parametrize("apart", ["/livez", "/api/renew/batch", "/api/reports", "/api/agent/jobs"])
def test_what_must_not_wait_behind_others_has_threads_of_its_own(apart: str) -> None:
    """Calls that hang in all other threads take no service from its orchestrator, and no lease its life."""
    ended = threading.Event()
    done: list[str] = []

    class Task:
        def __init__(self, path: str) -> None:
            self.requests = [type("Request", (), {"path": path})()]

        def service(self) -> None:
            path = self.requests[0].path
            done.append(path) if path == apart else ended.wait(30)

        def leave_loop(self) -> None:
            """No loop asks about it."""

        def cancel(self) -> None:
            """Nothing is to be undone."""

    dispatcher = ApartDispatcher(2)
    for path in ("/api/queue", "/readyz", "/healthz"):
        for _ in range(10):
            dispatcher.add_task(Task(path))
    dispatcher.add_task(Task(apart))
    wait_for(lambda: done == [apart])
    ended.set()
    dispatcher.shutdown()
