"""Generated datasets are valid, and equal for equal seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.edge.dataset_files import read_dataset, write_dataset
from simulator.edge.random_dataset import generate
from simulator.errors import InputError


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 10))
def test_a_generated_dataset_reads_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, jobs: int, hosts: int, stations: int, ues: int
) -> None:
    folder = tmp_path_factory.mktemp("generated")
    made = generate(seed, jobs=jobs, hosts=hosts, stations=stations, ues=ues)
    write_dataset(made, folder)
    read = read_dataset(folder)
    assert (read.jobs, read.tasks, read.devices) == (made.jobs, made.tasks, made.devices)
    assert (read.categories, len(made.jobs)) == (made.categories, jobs)
    for name in ("cpus", "memory_mib", "ue_rate", "ue_bs"):
        assert np.array_equal(getattr(read, name), getattr(made, name)), name


def test_a_dataset_depends_on_the_seed() -> None:
    assert generate(1).tasks == generate(1).tasks
    assert generate(1).tasks != generate(2).tasks


@pytest.mark.parametrize("numbers", [{"jobs": 0}, {"hosts": 0}, {"tasks_per_job": 0}, {"ues": -1}])
def test_what_no_policy_could_plan_is_not_generated(numbers: dict[str, int]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(numbers))} must be [01] or more, got "):
        generate(1, **numbers)
