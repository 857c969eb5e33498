"""Datasets so small that plans, transfers and scores can be calculated by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.edge.dataset import METRIC_PERIOD_S, NO_METRIC, Category, Dataset, Device, JobGraph, Kind, Task

PREPARE_S = 3
EXECUTOR = 2
"""CPUs, and MiB, of an executor."""

LARGE = 9
"""A category whose executors are three times as large."""


def job(
    arrival_s: int, *compute_s: int, chain: bool = False, data: int = 0
) -> tuple[int, Sequence[int], bool, int]:
    """Return a job of independent tasks, or of a chain whose tasks pass `data` units on."""
    return arrival_s, compute_s, chain, data


def world(
    *jobs: tuple[int, Sequence[int], bool, int],
    room: int = 1,
    stations: int = 0,
    ues: int = 0,
    categories: Sequence[int] = (),
) -> Dataset:
    """Return one host of factor 1 for `room` executors, base stations of factor 3, user devices of factor 5.

    `categories` are the categories of the tasks, in order; by default all are equal.
    """
    kinds: list[tuple[Kind, int]] = [("Cloud", 1)]
    kinds += [("BS", 3) for _ in range(stations)]
    kinds += [("UE", 5) for _ in range(ues)]
    devices = tuple(
        Device(
            index,
            kind,
            index,
            factor,
            rate=0 if kind == "UE" else 1000,
            cloud_id=0 if kind == "Cloud" else -1,
        )
        for index, (kind, factor) in enumerate(kinds)
    )
    capacity = np.full((len(devices), METRIC_PERIOD_S), 2 * EXECUTOR, dtype=np.int32)
    capacity[0] = room * EXECUTOR
    rate = np.full((ues, METRIC_PERIOD_S), 10, dtype=np.int32)
    link = np.full_like(rate, 1 if stations else NO_METRIC)
    tasks: dict[int, Task] = {}
    drawn: dict[int, JobGraph] = {}
    for job_id, (arrival_s, compute_s, chain, data) in enumerate(jobs):
        ids = range(len(tasks), len(tasks) + len(compute_s))
        for task_id, seconds in zip(ids, compute_s, strict=True):
            parents = ((task_id - 1, data),) if chain and task_id > ids.start else ()
            children = ((task_id + 1, data),) if chain and task_id + 1 < ids.stop else ()
            category = categories[task_id] if categories else 0
            tasks[task_id] = Task(task_id, job_id, category, parents, children, seconds)
        drawn[job_id] = JobGraph(job_id, arrival_s, tuple(ids))
    sizes = {each: EXECUTOR * (3 if each == LARGE else 1) for each in {0, *categories}}
    known = {each: Category(each, size, size, PREPARE_S) for each, size in sizes.items()}
    return Dataset("made", known, drawn, tasks, devices, capacity, capacity, rate, link)
