"""Small instances and jobs for tests, drawn or fixed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from simulator.oasis.model import Instance, TrainingJob


def a_job(job_id: str = "job", **changes: Any) -> TrainingJob:
    """Return a job of four worker-slots of one GPU and one CPU, two workers at most, one PS for both."""
    fields: dict[str, Any] = {
        "arrival": 0,
        "chunks": 2,
        "minibatches": 1,
        "epochs": 2,
        "minibatch_slots": 0.5,
        "gradient": 0.5,
        "worker": (1, 1, 2, 1, 2.0),
        "ps": (0, 1, 2, 1, 5.0),
        "priority": 10.0,
        "sensitivity": 0.5,
        "target": 4.0,
    }
    return TrainingJob(job_id, **(fields | changes))


def amounts(gpu: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(
        st.integers(0, gpu),
        st.integers(1, 4),
        st.integers(1, 8),
        st.integers(1, 4),
        st.sampled_from([0.3, 1.0, 2.5]),
    )


def ps_amounts() -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(
        st.just(0), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from([2.5, 3.7, 5.0])
    )


def servers(most: int, gpu: int) -> st.SearchStrategy[tuple[tuple[float, ...], ...]]:
    server = st.tuples(
        st.integers(0, gpu),
        st.integers(2, 8),
        st.integers(4, 16),
        st.integers(2, 8),
        st.sampled_from([5.0, 7.5, 10.0]),
    )
    return st.lists(server, min_size=1, max_size=most).map(tuple)


@st.composite
def instances(draw: st.DrawFn, jobs: int = 4, slots: int = 5, most_servers: int = 3) -> Instance:
    """Draw instances small enough for slow checks; every job could finish if it ran alone."""
    length = draw(st.integers(2, slots))
    found = []
    for index in range(draw(st.integers(1, jobs))):
        job = a_job(
            f"job-{index}",
            arrival=draw(st.integers(0, length - 1)),
            chunks=draw(st.integers(1, 4)),
            epochs=draw(st.integers(1, 3)),
            minibatch_slots=draw(st.sampled_from([0.1, 0.4, 0.75])),
            gradient=draw(st.sampled_from([0.0, 0.05])),
            worker=draw(amounts(2)),
            ps=draw(ps_amounts()),
            priority=draw(st.floats(1, 100)),
            sensitivity=draw(st.sampled_from([0.0, 0.3, 5.0])),
            target=draw(st.floats(1, 6)),
        )
        if job.arrival + job.shortest_duration <= length:
            found.append(job)
    if not found:
        found.append(a_job("job-0", chunks=1, epochs=1, minibatch_slots=0.5, gradient=0.0))
    return Instance(length, draw(servers(most_servers, 4)), draw(servers(most_servers, 0)), tuple(found))
