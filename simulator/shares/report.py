"""Report of a division for people: who gets least, who gains by knowing the GPU types, teams and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.present.tables import Column, Table
from simulator.present.units import number
from simulator.shares.division import Division
from simulator.shares.instance import Instance

NOTE = """\
normalised: 1 is a job that always runs, over all types as the fleet has them.
Teams: the mean of their jobs, the sum of their GPUs. GPUs: averages over time."""
BESIDE = "\nIn brackets: --agnostic, which takes all types for one, as fair_share does."


def as_values(instance: Instance, division: Division) -> dict[str, Any]:
    """Return the division as `--json` prints it."""
    by_job = {
        "normalised": division.normalised.tolist(),
        "throughput": division.throughput.tolist(),
        "gpus": [dict(zip(instance.gpus, row, strict=True)) for row in division.gpus.tolist()],
    }
    names = [job.name for job in instance.jobs]
    values = {key: dict(zip(names, each, strict=True)) for key, each in by_job.items()}
    return {"levels": list(division.levels), "programs": division.programs, **values}


def sentence(instance: Instance, division: Division, beside: Division | None) -> str:
    """Return what the job that is worst off gets, and who gains and loses most by knowing the types."""

    def lowest(of: Division) -> str:
        place = of.normalised.argmin()
        return f"the lowest job, {instance.jobs[place].name}, gets {number(of.normalised[place], 3)}"

    if beside is None:
        return f"Without knowledge of GPU types {lowest(division)}."
    text = f"With knowledge of GPU types {lowest(division)}; without it {lowest(beside)}."
    gains = (division.normalised - beside.normalised).round(3)
    for place, verb in ((gains.argmax(), "gains"), (gains.argmin(), "loses")):
        if (gains[place] > 0) == (verb == "gains") and gains[place]:
            now, then = (number(each.normalised[place], 3) for each in (division, beside))
            text += f" Job {instance.jobs[place].name} {verb} most: {now} instead of {then}."
    return text


def tables(instance: Instance, division: Division, beside: Division | None) -> list[Table]:
    """Return a table of the teams, if there are any, and one of the jobs, those of a kind in one row."""
    teams: dict[str, list[int]] = {}
    kinds: dict[object, list[int]] = {}
    for place, job in enumerate(instance.jobs):
        if job.team is not None:
            teams.setdefault(job.team, []).append(place)
        kinds.setdefault((job.kind or place, job.team, job.weight, job.gpus), []).append(place)
    divisions = [division] if beside is None else [division, beside]
    amounts = [Column(title) for title in ("normalised", *instance.gpus)]
    by_job = []
    for places in kinds.values():
        job = instance.jobs[places[0]]
        name = job.name if len(places) == 1 else f"{job.kind} × {len(places)}"
        by_job.append([name, *([job.team or ""] if teams else []), *_cells(places, divisions, 1)])
    heads = [Column(title, "text") for title in (("job", "team") if teams else ("job",))]
    jobs = Table([*heads, *amounts], by_job, note=NOTE if beside is None else NOTE + BESIDE)
    by_team = [[name, str(len(each)), *_cells(each, divisions, len(each))] for name, each in teams.items()]
    return [Table([Column("team", "text"), Column("jobs"), *amounts], by_team), jobs] if teams else [jobs]


def _cells(places: Sequence[int], divisions: Sequence[Division], jobs: int) -> list[str]:
    """Return the mean normalised throughput, and the GPUs of so many of these jobs, of each division."""
    cells = []
    for division in divisions:
        gpus = division.gpus[places].mean(axis=0) * jobs
        cells.append([f"{division.normalised[places].mean():.3f}", *(f"{each:.2f}" for each in gpus)])
    return [f"{now} ({then})" for now, then in zip(*cells, strict=True)] if cells[1:] else cells[0]
