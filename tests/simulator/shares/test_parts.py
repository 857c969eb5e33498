"""Parts: every K-th job on a K-th of the GPUs, each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.errors import SimulationError
from simulator.shares.division import Options, divide_fleet
from simulator.shares.instance import Instance, Job
from simulator.shares.parts import divide

JOBS = tuple(Job(str(place), None, (1.0, float(place + 1))) for place in range(5))
WHOLE = Instance({"old": 5, "new": 4}, JOBS, {}, {})


def test_jobs_go_in_turn_and_gpus_are_rounded_down() -> None:
    first, second = divide(WHOLE, 2)
    assert [job.name for job in first.jobs] == ["0", "2", "4"]
    assert [job.name for job in second.jobs] == ["1", "3"]
    assert first.gpus == second.gpus == {"old": 2, "new": 2}


def test_every_job_has_what_its_part_gives_it() -> None:
    whole = divide_fleet(WHOLE, Options("max_min", parts=2))
    for number, part in enumerate(divide(WHOLE, 2)):
        alone = divide_fleet(part, Options("max_min"))
        assert whole.throughput[number::2] == pytest.approx(alone.throughput)
        assert whole.levels[number] == alone.levels[0]
    assert whole.programs == sum(divide_fleet(part, Options("max_min")).programs for part in divide(WHOLE, 2))


@pytest.mark.parametrize(
    ("gpus", "parts", "message"),
    [
        ({"old": 5, "new": 4}, 6, "--parts 6 for 5 jobs: some parts would have none"),
        ({"old": 2, "new": 2}, 3, "job '0' can run on no GPU type of its part of the fleet"),
    ],
)
def test_parts_that_have_nothing_are_refused(gpus: dict[str, int], parts: int, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        divide(Instance(gpus, JOBS, {}, {}), parts)


@pytest.mark.parametrize("pack", [False, True])
def test_a_job_gets_nothing_of_a_type_with_fewer_gpus_than_it_needs(pack: bool) -> None:
    """As if the file left that type out, which it cannot do for one job of a kind; nor is it shared."""
    kind = (1.0, 9.0)
    jobs = tuple(Job(name, "k", kind, gpus=gpus) for name, gpus in (("a", 4), ("b", 1), ("c", 4), ("d", 1)))
    whole = Instance({"many": 16, "few": 4}, jobs, {}, {("k", "k"): (kind, kind)})
    division = divide_fleet(whole, Options("max_min", pack=pack, parts=2))
    assert division.gpus[::2, 1] == pytest.approx([0.0, 0.0])
    assert (division.gpus[1::2, 1] > 0).all()
    left_out = tuple(replace(job, rates=(1.0, 0.0)) if job.gpus == 4 else job for job in jobs)
    without = divide_fleet(replace(whole, jobs=left_out), Options("max_min", pack=pack, parts=2))
    assert division.normalised == pytest.approx(without.normalised)
