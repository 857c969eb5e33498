"""Policies and queue orders side by side on one workload: the runs of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from resource_manager.scheduling.policies import get_policy, takes_seed
from resource_manager.scheduling.policies.fgd import Fragmentation
from resource_manager.scheduling.queue_order import get_order
from simulator.errors import InputError
from simulator.replay import metrics, openb
from simulator.replay.history import read_history, workload_of
from simulator.replay.replay import Record, Replay
from simulator.replay.workload import Workload, read_workload

WAITS_KEPT = 400
FORMAT = 3
"""Version of a kept result; a result of another version is run again."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the workload: `openb` (folder, pod list), `jobs` (nodes, jobs) or `history` (file or URL)."""

    kind: str
    paths: tuple[str, ...]

    def fingerprint(self) -> list[object]:
        """Return values that identify the files and change with their content."""
        found: list[object] = [self.kind, *self.paths]
        for text in self.paths:
            path = Path(text)
            files = sorted(path.glob("*/*")) if path.is_dir() else [path] if path.is_file() else []
            found += [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a comparison."""

    source: Source
    policy: str
    order: str
    seed: int
    quotas: tuple[tuple[str, float], ...] = ()

    def fingerprint(self) -> str:
        """Return all that decides the result, as text."""
        return json.dumps(
            [FORMAT, self.source.fingerprint(), self.policy, self.order, self.seed, self.quotas]
        )

    @property
    def name(self) -> str:
        return self.policy if self.source.kind == "openb" else f"{self.policy}, {self.order}"


def cases(
    source: Source,
    policies: Sequence[str],
    orders: Sequence[str],
    seeds: Sequence[int],
    quotas: tuple[tuple[str, float], ...] = (),
) -> list[Case]:
    """Return every combination that can differ: openb has no order; elsewhere few policies take a seed."""
    found: list[Case] = []
    for policy in policies:
        for order in orders[:1] if source.kind == "openb" else orders:
            some = seeds if source.kind == "openb" or takes_seed(get_policy(policy)) else seeds[:1]
            found += [Case(source, policy, order, seed, quotas) for seed in some]
    return found


def cases_as_values(
    source: Source, policies: Sequence[str], orders: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the cases as JSON values, for callers that distribute the runs themselves."""
    return [asdict(case) for case in cases(source, policies, orders, seeds)]


def case_from_values(values: Mapping[str, Any]) -> Case:
    """Return the case that `cases_as_values` wrote."""
    source = Source(values["source"]["kind"], tuple(values["source"]["paths"]))
    quotas = tuple((team, share) for team, share in values["quotas"])
    return Case(source, values["policy"], values["order"], values["seed"], quotas)


def check(source: Source, policies: Sequence[str], orders: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise an error about a wrong name or file before any run starts."""
    for order in orders:
        get_order(order)
    if source.kind == "openb":
        for seed in seeds:
            trace = openb.read_trace(Path(source.paths[0]), source.paths[1], seed)
        fragmentation = Fragmentation.of(trace.pods)
        for policy in policies:
            openb.policy_for(policy, fragmentation, 0)
        return
    for policy in policies:
        get_policy(policy)
    read(source)


def read(source: Source) -> Workload:
    """Return the workload; a process reads it again only when its files change."""
    return _read(source, json.dumps(source.fingerprint()))


@lru_cache(maxsize=2)
def _read(source: Source, fingerprint: str) -> Workload:
    if source.kind == "history":
        return workload_of(read_history(source.paths[0]), "history")
    if source.kind == "jobs":
        return read_workload(Path(source.paths[0]), Path(source.paths[1]))
    raise InputError(f"unknown kind of workload {source.kind!r}")


@lru_cache(maxsize=2)
def _read_openb(folder: str, pods: str, seed: int) -> openb.Trace:
    return openb.read_trace(Path(folder), pods, seed)


def run_case(case: Case) -> dict[str, Any]:
    """Return the figures, curves and waits of one run, as JSON values."""
    head = {"name": case.name, **{key: value for key, value in asdict(case).items() if key != "source"}}
    if case.source.kind == "openb":
        trace = _read_openb(*case.source.paths, case.seed)
        summary, rows = openb.replay(trace, case.policy, case.seed)
        columns = dict(zip(openb.CURVE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        return {"case": head, "summary": summary, "curve": columns}
    record = play(read(case.source), case.policy, case.order, case.seed, dict(case.quotas))
    return {"case": head, "summary": metrics.summarise(record), **curve_data(record)}


def play(workload: Workload, policy: str, order: str, seed: int, quotas: dict[str, float]) -> Record:
    """Return the record of one replay of a workload with run times."""
    return Replay(workload, get_policy(policy, seed=seed), get_order(order, quotas)).run()


def curve_data(record: Record) -> dict[str, Any]:
    """Return the data of a report's figures: means over each sixtieth of the time, and some of the waits."""
    waits = sorted(
        metrics.wait_s(job_run) for job_run in record.job_runs.values() if job_run.started_at is not None
    )
    step = max(math.ceil(len(waits) / WAITS_KEPT), 1)
    nodes, shares, start, end = metrics.busy_shares(record)
    at_s, used, total, pending = metrics.binned(record)
    return {
        "curve": {
            "at_s": at_s,
            "allocated_percent": [
                100 * part / max(whole, 1) for part, whole in zip(used, total, strict=True)
            ],
            "waiting": pending,
        },
        "waits_s": waits[::step] + waits[-1:],
        "heat": {"nodes": nodes, "shares": shares, "start_s": 0.0, "end_s": end - start},
    }
