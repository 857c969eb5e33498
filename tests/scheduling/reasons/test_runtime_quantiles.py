"""Runtimes as quantiles: learnt from what is over, sure of what is known, and right as often as they say."""

from __future__ import annotations

import pickle
import random
from itertools import islice, product

import pytest

from resource_manager.core.changes import Granted, MembersReleased, Released
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.scheduling.reasons.runtime_quantiles import (
    MAX_CLASSES,
    RuntimeModel,
    RuntimeQuantiles,
    RunWalk,
)


def task(number: int = 0, name: str = "train", **more: object) -> Request:
    return Request(f"{name}_{number}", 1, **more)  # type: ignore[arg-type]


def learnt(*runs: float, name: str = "train", model: RuntimeModel | None = None) -> RuntimeModel:
    model = model or RuntimeModel()
    for number, seconds in enumerate(runs):
        model.learn(task(number, name), seconds)
    return model


def known(model: RuntimeModel, request: Request) -> RuntimeQuantiles:
    found = model.estimate(request)
    assert found is not None
    return found


def test_without_runs_nothing_is_known() -> None:
    assert RuntimeModel().estimate(task()) is None
    assert learnt(60, 60).estimate(task(name="other")) is None, "two runs of another task tell nothing"


def test_few_runs_of_a_task_are_joined_by_those_of_others_and_many_stand_alone() -> None:
    model = learnt(*[60.0, 600.0] * 10, name="other")
    assert known(model, task()).at(1) == pytest.approx(600)
    learnt(3600, model=model)
    few = known(model, task(9))
    assert few.low_s < 600 < few.at(1)
    learnt(*[3600, 3700, 3800] * 7, model=model)
    many = known(model, task(9))
    assert 3500 < many.low_s < many.at(0.5) == pytest.approx(3700, rel=0.01)


def test_runs_that_never_differ_are_estimated_exactly_whatever_others_do() -> None:
    model = learnt(*[60.0, 6000.0] * 10, name="other")
    learnt(500, 500, 500, model=model)
    found = known(model, task(9))
    assert (found.low_s, found.at(0.5), found.high_s) == pytest.approx((500, 500, 500))


def test_runs_on_one_gpu_that_never_differ_tell_little_of_the_first_run_on_eight() -> None:
    model = learnt(3600, 3600, 3600)
    found = known(model, Request("train_9", 8))
    assert (found.low_s, found.at(0.5), found.high_s) == pytest.approx((1800, 3600, 7200))
    model.learn(Request("train_9", 8), 1900)
    assert known(model, Request("train_10", 8)).high_s < 3600, "a run of that shape is known now"


def test_the_runs_that_the_state_keeps_are_a_begin() -> None:
    assert known(
        RuntimeModel({"i/dag/train": (60.0,)}),
        task(labels={"instance": "i", "dag_id": "dag", "task_id": "train"}),
    ).at(0.5) == pytest.approx(60)


def test_what_has_run_for_long_does_not_end_before() -> None:
    found = known(learnt(*range(3600, 7200, 200)), task(99))
    for elapsed_s in (1.0, 4000.0, 7000.0, 10_000.0):
        quantiles = [found.given(elapsed_s).at(level) for level in (0.0, 0.1, 0.5, 0.9)]
        assert quantiles == sorted(quantiles)
        assert quantiles[0] >= elapsed_s
    assert found.given(10_000.0).at(0.5) == pytest.approx(11_000), "longer than all that is known"


def test_of_stated_runtimes_it_is_learnt_how_wrong_they_are() -> None:
    model = RuntimeModel()
    assert known(model, task(expected_runtime_s=600)).at(0.5) == pytest.approx(600)
    for number in range(20):
        model.learn(task(number, expected_runtime_s=1000.0 + number), 2 * (1000.0 + number))
    assert known(model, task(99, expected_runtime_s=600)).at(0.5) == pytest.approx(1200, rel=0.01)


def test_a_runtime_that_changed_by_ten_is_found_and_the_interval_is_wide_meanwhile() -> None:
    model = learnt(*[600.0] * 20)
    learnt(*[6000.0] * 3, model=model)
    assert known(model, task(99)).high_s == pytest.approx(6000, rel=0.1)
    learnt(*[6000.0] * 17, model=model)
    assert known(model, task(99)).at(0.5) == pytest.approx(6000, rel=0.01)


def test_a_clock_that_jumped_spoils_no_median() -> None:
    model = learnt(*[600.0] * 18, -86_400.0, 86_400.0)
    assert known(model, task(99)).at(0.5) == pytest.approx(600, rel=0.01)


def test_four_of_five_outcomes_are_inside_whatever_the_runtimes_are_like() -> None:
    draw = random.Random(0)
    inside = 0
    model = RuntimeModel()
    for number in range(2000):
        request = task(number, draw.choice("abcdefgh"))
        given = model.estimate(request)
        seconds = draw.lognormvariate(ord(request.lease_id[0]) % 8, 1.5)
        model.learn(request, seconds, given)
        if number >= 1000:
            assert given is not None
            inside += given.low_s <= max(seconds, 1.0) <= given.high_s
    assert inside / 1000 == pytest.approx(0.8, abs=0.03)


def test_only_the_last_classes_are_kept() -> None:
    model = RuntimeModel()
    others = (chr(0x4E00 + number) for number in range(MAX_CLASSES // 2 - 3))
    for name in ("a", "b", *others, "d", "e"):  # each is one class by itself, and one by its GPUs
        learnt(60, 600, name=name, model=model)
    learnt(*[6000] * 20, name="e", model=model)
    assert known(model, task(name="a")) == known(model, task(name="new"))
    assert known(model, task(name="b")).at(0.5) < known(model, task(name="new")).at(0.5)
    assert known(model, task(name="d")).at(0.5) < known(model, task(name="new")).at(0.5)


def test_runs_that_go_on_beside_the_first_that_are_over_make_a_class_longer() -> None:
    """Of a hundred runs that begin together the first ten are over: these are the short ones."""
    draw = random.Random(0)
    runs_s = sorted(draw.lognormvariate(6, 1) for _ in range(100))
    model = RuntimeModel()
    for seconds in runs_s[:10]:
        model.learn(Request("t_1", 1), seconds)
    over = model.estimate(Request("t_2", 1))
    assert over is not None
    beside = over.beside(10, [runs_s[9]] * 90)
    assert over.at(0.5) < runs_s[9] < beside.at(0.5)
    assert over.beside(10, []) == over
    assert over.beside(10, [1.0] * 90) == over, "what has just begun tells nothing"


def test_a_hold_ends_when_it_says_however_wrong_others_were() -> None:
    model = RuntimeModel()
    for number in range(30):
        model.learn(task(number, expected_runtime_s=3600), 10)
    assert known(model, task(expected_runtime_s=3600)).at(0.5) < 1000
    assert known(model, task(expected_runtime_s=3600, ttl_s=3600)).at(0.5) < 1000, "its task renews it"
    hold = known(model, Request("hand:ada@desk/78f9b808", 1, expected_runtime_s=3600, ttl_s=3600))
    assert (hold.low_s, hold.high_s) == pytest.approx((3600, 3600))


def walked(*runs: tuple[Request, float]) -> RuntimeModel:
    walk = RunWalk(RuntimeModel())
    for token, (request, seconds) in enumerate(runs, start=1):
        walk.add(Granted(Lease(request, (Placement("a", (0,)),), token, 0.0), 0.0))
        walk.add(Released(request.lease_id, token, seconds, "SUCCESS"))
    return walk.model


def test_a_service_that_runs_for_months_keeps_no_gang_whose_members_have_ended_one_by_one() -> None:
    walk, members = RunWalk(RuntimeModel()), (Placement("a", (0,)), Placement("b", (0,)))
    for token in range(1, 4):
        walk.add(Granted(Lease(Request("a gang", 1, nodes=2), members, token, 0.0), 0.0))
        for rank in (1, 0):
            walk.add(MembersReleased("a gang", token, (rank,), 60.0, "SUCCESS"))
    assert b"a gang" not in pickle.dumps(walk)


def test_what_was_left_of_a_job_that_was_preempted_is_no_runtime() -> None:
    rest = task(9, labels={"restart_count": "1"})
    model = walked(*[(task(), 3600.0)] * 3, *[(rest, 60.0)] * 3)
    assert known(model, task()).low_s == pytest.approx(3600)


def test_runs_by_hand_tell_of_their_user_and_push_out_no_task() -> None:
    ids = islice(product("abcdef", repeat=8), MAX_CLASSES // 2)
    by_hand = ((Request(f"hand:ada@desk/{''.join(each)}", 1), 60.0) for each in ids)
    model = walked(*[(task(), 3600.0)] * 3, *by_hand)
    assert known(model, task(9)).at(0.5) > 600
    assert known(model, Request("hand:ada@desk/ffffffff", 1)).at(0.5) == pytest.approx(60)
