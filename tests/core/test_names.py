"""Names for people: short ids from the order of arrival, and display names."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.models import Request
from resource_manager.core.names import (
    ALPHABET,
    CYCLE,
    SHORT_IDS,
    display_name,
    name_of,
    number_of,
    short_id,
)
from resource_manager.core.pending import PendingRequest

RUNS = {"instance": "air", "dag_id": "my_dag", "run_id": "manual__1", "task_id": "train", "map_index": "-1"}


def request(lease_id: str, **labels: str) -> Request:
    return Request(lease_id, gpus=1, resources={"cpus": 1}, labels=labels)


def task(run: int, map_index: int = -1, task_id: str = "train", **labels: str) -> Request:
    named = RUNS | {"run_id": f"run{run}", "task_id": task_id, "map_index": str(map_index)}
    return request(f"air:my_dag/run{run}/{task_id}/{map_index}", **(named | labels))


# ---- short ids ----


@given(st.integers(0, 3 * CYCLE))
def test_a_short_id_tells_the_number_it_was_made_of(sequence: int) -> None:
    assert number_of(short_id(sequence)) == sequence % CYCLE


def test_the_first_have_four_characters_and_no_two_are_equal() -> None:
    first = [short_id(number) for number in range(SHORT_IDS)]
    assert len(set(first)) == SHORT_IDS == 279_841
    assert {len(text) for text in first} == {4}
    assert {len(short_id(number)) for number in (SHORT_IDS, CYCLE - 1)} == {5}
    assert short_id(CYCLE) == short_id(0)


def test_none_is_given_again_for_6_716_184_requests() -> None:
    assert CYCLE == 6_716_184
    assert CYCLE / 30 > 223_000, "requests a day, for 30 days"


@pytest.mark.parametrize("start", [1, 5000, SHORT_IDS, CYCLE - 200])
def test_those_that_arrive_together_do_not_look_alike(start: int) -> None:
    """A slip of the finger finds nothing, instead of a neighbour's job."""
    texts = [short_id(start + number) for number in range(150)]
    for (one, text), (other, another) in combinations(enumerate(texts), 2):
        if len(text) == len(another):
            differing = sum(a != b for a, b in zip(text, another, strict=True))
            assert differing >= (len(text) if other - one < 12 else 2)


def test_short_ids_have_no_vowels_and_no_characters_that_look_alike() -> None:
    assert not set(ALPHABET) & set("aeiouy" + "01l" + "8sz")


@pytest.mark.parametrize("text", ["", "train", "bcd", "bcdfgh", "BCDF", "b cd", "bcd€", "0000"])
def test_what_is_no_short_id_has_no_number(text: str) -> None:
    assert number_of(text) is None


# ---- display names ----


def display_name_of(asked: Request) -> str:
    return display_name(asked.lease_id, asked.labels)


def test_a_task_of_airflow_is_called_by_its_dag_and_index() -> None:
    assert display_name_of(task(1)) == "my_dag.train"
    assert display_name_of(task(1, 3)) == "my_dag.train[3]"
    assert display_name_of(task(1, task_id="group.train")) == "my_dag.group.train"


def test_a_gpu_lease_is_called_by_its_group() -> None:
    assert display_name_of(task(1, task_id="gpu_lease.allocate", scope="run")) == "my_dag.gpu_lease"
    assert display_name_of(task(1, task_id="etl.allocate")) == "my_dag.etl.allocate"


@pytest.mark.parametrize(
    "labels", [{}, {"dag_id": "d"}, {**RUNS, "dag_id": ".."}, {**RUNS, "task_id": "a/b"}]
)
def test_what_is_no_task_of_airflow_is_called_by_its_lease_id(labels: dict[str, str]) -> None:
    assert display_name_of(request("lab/train", **labels)) == "lab/train"


def test_what_runs_by_hand_is_called_by_who_runs_it_and_where() -> None:
    assert display_name_of(request("hand:ada@gpu-1/1f2e3d4c", launcher="terminal")) == "ada@gpu-1"
    assert display_name_of(request("hand:Ada Lovelace@console/1f2e3d4c")) == "Ada Lovelace@console"
    assert display_name_of(request("hand:ada@gpu-1/own")) == "hand:ada@gpu-1/own"
    for other in ("hand:my_dag.train/1f2e3d4c", "hand:ada@gpu-1/own/1f2e3d4c", "hand:@gpu-1/1f2e3d4c"):
        assert display_name_of(request(other)) == other, "no name of somebody or something else"


def test_the_name_of_an_id_of_many_ats_is_found_at_once() -> None:
    """Else requests with such ids would stop everybody who looks for a name."""
    lease_id, began = "hand:" + "@" * 20_000, time.process_time()
    assert display_name_of(request(lease_id)) == lease_id
    assert time.process_time() - began < 0.5


def test_a_sentence_has_display_name_and_short_id_and_leaves_out_the_middle_of_a_long_one() -> None:
    assert name_of(PendingRequest(task(1), 0.0, 4)) == f"my_dag.train {short_id(4)}"
    assert len(name_of(PendingRequest(request("x" * 1000), 0.0, 4))) < 130
