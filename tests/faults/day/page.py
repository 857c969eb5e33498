"""Page of a day: who waited how long, what was lost, and the timeline of all servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from simulator.present.figures import Bar, draw_gantt, drawing, legend_below, new_figure, picture
from simulator.present.page import Page, Section, render
from simulator.present.palette import SERIES_COLOURS
from simulator.present.tables import Cell, Column, Table
from simulator.present.units import duration
from simulator.stats import mean, percentile
from tests.faults.day.gaps import GAP_S, estimates, gaps, start_delays, unexplained
from tests.faults.day.plan import GPUS, SERVERS, WORKERS, DayJob, name_of
from tests.faults.day.proof import Evidence, Span, preempted, remarks, spans

LONGEST = 10
ROW_INCHES = 0.24


def page_of(found: Evidence, problems: Sequence[str]) -> str:
    """Return the page as HTML."""
    held = spans(found.changes, found.lost)
    with drawing():
        timeline = picture("Timeline of the servers", _timeline(found, held), wide=True)
    return render(
        Page(
            title="A day of the cluster",
            verdict=_verdict(found, held, problems),
            sections=[
                Section(
                    "Waiting",
                    tables=[
                        _by(found, held, "team"),
                        _by(found, held, "way"),
                        _by(found, held, "priority"),
                        _longest(found, held),
                    ],
                ),
                Section("Idle GPUs", tables=[_gaps(found, held), _starts(found, held)]),
                Section("What happened", tables=[_faults(found, held)]),
                Section("Timeline", "A row is a server, a bar a lease.", pictures=[timeline]),
                *([Section("Broken promises", tables=[_table("promise", problems)])] if problems else []),
                *(
                    [Section("Remarks", tables=[_table("remark", odd)])]
                    if (odd := list(remarks(found)))
                    else []
                ),
            ],
            about=f"{SERVERS} servers with {GPUS} GPUs behind agents, the machine of Airflow's workers, and "
            f"a Slurm; load of the machine in the last quarter of an hour {found.load:.1f}.",
        )
    )


def _verdict(found: Evidence, held: Sequence[Span], problems: Sequence[str]) -> list[str]:
    done = sum(task["state"] == "success" for task in found.tasks.values())
    lost = f"{len(problems)} promises were broken" if problems else "nothing that was promised was lost"
    victims = preempted(found.changes)
    again = sum(task["try_number"] > 1 for task in found.tasks.values())
    waits = [wait for job in found.jobs for wait in _waits(held, job.name)]
    told, inside, late = estimates(found, held)
    idle = unexplained(gaps(found, held))
    return [
        f"{done} of {len(found.jobs)} jobs succeeded, and {lost}.",
        f"A job waited {duration(mean(waits) or 0.0)} in the mean, "
        f"{duration(max(waits, default=0.0))} at most. {len(victims)} preemptions met {len(set(victims))} "
        f"jobs; {again} jobs needed another try.",
        f"{len(idle)} times free GPUs idled for more than {GAP_S:g} s without a reason while somebody "
        "waited.",
        f"Of {told} first estimates {inside} held ({inside / max(told, 1):.0%}), and {late} jobs began "
        "later.",
    ]


def _waits(held: Iterable[Span], name: str) -> list[float]:
    """Return the job's waits: for its first grant, and for each after a preemption or a lost server.

    One that waits again does so at its old place, but not since then.
    """
    waits, ran_until = [], 0.0
    for _, members in groupby((span for span in held if span.name == name), key=lambda span: span.token):
        own = [*members]
        waits.append(own[0].begin - max(own[0].queued_at, min(ran_until, own[0].begin)))
        ran_until = max(span.end for span in own)
    return waits


def _by(found: Evidence, held: Sequence[Span], key: str) -> Table:
    victims = Counter(preempted(found.changes))
    groups: dict[str, list[DayJob]] = {}
    for job in sorted(found.jobs, key=lambda job: str(getattr(job, key))):
        groups.setdefault(str(getattr(job, key)), []).append(job)
    rows: list[list[Cell]] = []
    for name, jobs in groups.items():
        waits = [wait for job in jobs for wait in _waits(held, job.name)]
        names = {job.name for job in jobs}
        gpu_s = sum(
            (min(span.end, found.ended) - span.begin) * len(span.gpu_ids)
            for span in held
            if span.name in names
        )
        rows.append(
            [
                name,
                len(jobs),
                mean(waits),
                percentile(waits, 95),
                max(waits, default=None),
                sum(victims[name] for name in names),
                gpu_s / 3600,
            ]
        )
    columns = [
        Column(key, "text"),
        Column("jobs"),
        Column("mean wait", "time"),
        Column("95 % wait at most", "time"),
        Column("longest wait", "time"),
        Column("preemptions"),
        Column("GPU-hours", digits=1),
    ]
    return Table(columns, rows, title=f"By {key}")


def _gaps(found: Evidence, held: Sequence[Span]) -> Table:
    of_reason: dict[str, list[float]] = {}
    for gap in gaps(found, held):
        short = "" if gap.seconds > GAP_S else f"at most {GAP_S:g} s"
        of_reason.setdefault(gap.why or short or "no reason", []).append(gap.seconds)
    rows: list[list[Cell]] = [
        [why, len(long), mean(long), percentile(long, 95), max(long)]
        for why, long in sorted(of_reason.items())
    ]
    columns = [
        Column("why free GPUs waited for their next lease", "text"),
        Column("times"),
        Column("mean", "time"),
        Column("95 % at most", "time"),
        Column("longest", "time"),
    ]
    return Table(columns, rows)


def _starts(found: Evidence, held: Sequence[Span]) -> Table:
    rows: list[list[Cell]] = [
        [way, len(delays), percentile(delays, 50), percentile(delays, 95), max(delays)]
        for way, delays in sorted(start_delays(found, held).items())
    ]
    columns = [
        Column("way", "text"),
        Column("starts"),
        Column("median", "time"),
        Column("95 % at most", "time"),
        Column("longest", "time"),
    ]
    return Table(columns, rows, title="From a grant to the first line of its job")


def _longest(found: Evidence, held: Sequence[Span]) -> Table:
    waits = sorted(
        ((max(_waits(held, job.name), default=0.0), job) for job in found.jobs), key=lambda each: -each[0]
    )
    rows: list[list[Cell]] = [
        [job.name, job.team, job.priority, job.nodes * job.gpus, wait] for wait, job in waits[:LONGEST]
    ]
    columns = [
        Column("job", "text"),
        Column("team", "text"),
        Column("priority"),
        Column("GPUs"),
        Column("wait", "time"),
    ]
    return Table(columns, rows, title="The longest waits")


def _faults(found: Evidence, held: Sequence[Span]) -> Table:
    rows: list[list[Cell]] = []
    for at, what in sorted(found.faults):
        running = {span.name for span in held if span.begin <= at < span.end}
        waiting = {span.name for span in held if span.queued_at <= at < span.begin}
        rows.append([what, at - found.began, len(running), len(waiting)])
    columns = [Column("event", "text"), Column("at", "time"), Column("jobs running"), Column("jobs waiting")]
    return Table(columns, rows)


def _table(title: str, lines: Sequence[str]) -> Table:
    return Table(
        [Column("", "text"), Column(title, "text")], [[str(n), line] for n, line in enumerate(lines, 1)]
    )


def _timeline(found: Evidence, held: Sequence[Span]) -> object:
    team_of = {job.name: job.team for job in found.jobs}
    bars = [
        Bar(
            span.node,
            span.begin - found.began,
            min(span.end, found.ended) - found.began,
            team_of.get(span.name),
        )
        for span in held
    ]
    rows = [*(name_of(number) for number in range(SERVERS)), WORKERS]
    figure, axes = new_figure(width=13, height=ROW_INCHES * SERVERS * 2)
    draw_gantt(axes, bars, rows, found.ended - found.began)
    for place, team in enumerate(dict.fromkeys(bar.group for bar in bars)):
        axes.plot([], [], color=SERIES_COLOURS[place], linewidth=8, label=f"team {team}")
    legend_below(axes)
    return figure
