"""Seeded workflows in the shapes of the literature: Montage, CyberShake, fork-join, chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simulator.errors import InputError
from simulator.serverless.template import DEFAULT_SINGLE_CORE_SPEED, WorkflowTemplate, operations

Pairs = list[tuple[int, int]]

MEMORY_MIB = (128, 256, 512, 1024)
PARALLELISM = (1, 1, 2, 4)
RUNTIME_S = (1.0, 15.0)
MEGABYTE = 1_000_000
MAX_SIZE = 100_000
"""Upper bound of a shape: a larger one would run for hours or exhaust the memory."""


def chain(size: int) -> tuple[int, Pairs]:
    """Return `size` functions, one after another."""
    return size, [(fn_id, fn_id + 1) for fn_id in range(size - 1)]


def fork_join(size: int) -> tuple[int, Pairs]:
    """Return one function, `size` in parallel, and one that needs them all."""
    return size + 2, [edge for middle in range(1, size + 1) for edge in ((0, middle), (middle, size + 1))]


def montage(size: int) -> tuple[int, Pairs]:
    """Return a mosaic of `size` images: project, fit neighbours, model background, correct, add, shrink.

    Source: the characterisation of Montage by Juve et al., Characterizing and profiling scientific
    workflows, Future Generation Computer Systems 29(3), 2013.
    """
    fits = range(size, 2 * size - 1)
    concat, model = 2 * size - 1, 2 * size
    corrected = range(model + 1, model + 1 + size)
    table, add, shrink, picture = (corrected.stop + step for step in range(4))
    pairs: Pairs = []
    for image, fit in enumerate(fits):
        pairs += [(image, fit), (image + 1, fit), (fit, concat)]
    pairs.append((concat, model) if size > 1 else (0, model))
    for image, background in enumerate(corrected):
        pairs += [(image, background), (model, background), (background, table)]
    pairs += [(table, add), (add, shrink), (shrink, picture)]
    return picture + 1, sorted(set(pairs))


def cybershake(size: int) -> tuple[int, Pairs]:
    """Return two extractions, `size` seismograms with a peak each, and an archive of each kind.

    Source: the characterisation of CyberShake by Juve et al. (see `montage`).
    """
    seismograms = range(2, 2 + size)
    peaks = range(2 + size, 2 + 2 * size)
    archive_seismograms, archive_peaks = peaks.stop, peaks.stop + 1
    pairs: Pairs = []
    for seismogram, peak in zip(seismograms, peaks, strict=True):
        pairs += [
            (seismogram % 2, seismogram),
            (seismogram, peak),
            (seismogram, archive_seismograms),
            (peak, archive_peaks),
        ]
    return archive_peaks + 1, pairs


SHAPES: dict[str, Callable[[int], tuple[int, Pairs]]] = {
    "montage": montage,
    "cybershake": cybershake,
    "fork_join": fork_join,
    "chain": chain,
}


def generate_workflow(
    shape: str,
    size: int,
    seed: int,
    single_core_speed: int = DEFAULT_SINGLE_CORE_SPEED,
) -> WorkflowTemplate:
    """Generate a workflow of that shape; runtimes, memory, threads and bytes are drawn with the seed.

    `size` is the width of the shape (the length of a chain). Runtimes are 1 to 15 s with one core per
    thread, edges carry up to 500 MB. Raises `InputError` for an unknown shape or size.
    """
    if shape not in SHAPES:
        raise InputError(f"unknown workflow shape {shape!r}; known are {', '.join(SHAPES)}")
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"a workflow's size must be from 1 to {MAX_SIZE:,}, got {size}")
    count, pairs = SHAPES[shape](size)
    random = np.random.default_rng([seed, list(SHAPES).index(shape), size])
    parallelisms: list[int] = random.choice(PARALLELISM, size=count).tolist()
    runtimes_s: list[float] = random.uniform(*RUNTIME_S, size=count).tolist()
    sizes: list[int] = (random.integers(1, 500, size=len(pairs)) * MEGABYTE).tolist()
    return WorkflowTemplate(
        operations(runtimes_s, single_core_speed, parallelisms),
        tuple(random.choice(MEMORY_MIB, size=count).tolist()),
        tuple(parallelisms),
        tuple((*pair, amount) for pair, amount in zip(pairs, sizes, strict=True)),
        f"{shape}-{size}-{seed}",
    )


def generate_workflows(
    shapes: Sequence[str] = tuple(SHAPES),
    size: int = 6,
    seed: int = 0,
    single_core_speed: int = DEFAULT_SINGLE_CORE_SPEED,
) -> list[WorkflowTemplate]:
    """Generate one workflow of each shape."""
    return [generate_workflow(shape, size, seed, single_core_speed) for shape in shapes]
