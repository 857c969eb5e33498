"""Policies and queue orders side by side on one workload: the runs of a comparison."""

from __future__ import annotations

import json
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
from simulator.replay.curves import curve_data
from simulator.replay.history import read_history, workload_of
from simulator.replay.replay import Record, Replay
from simulator.replay.workload import Workload, read_workload
from simulator.rounds.policies import get_round_policy, is_round_policy
from simulator.rounds.record import Rounds, curves, summarise
from simulator.rounds.studies import STUDIES, study, study_workload
from simulator.rounds.timed import timed_rounds

FORMAT = 5
"""Version of a kept result; a result of another version is run again."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the workload: its kind, its paths, and whether `jobs` larger than a server are split.

    `openb` (folder, pod list), `jobs` (nodes, jobs), `history` (file or URL), `pollux` (folder, load,
    workload) or `shockwave` (folder).
    """

    kind: str
    paths: tuple[str, ...]
    split_large_jobs: bool = False

    @property
    def name(self) -> str:
        """The workload in a title: the study with load and workload, or the file of the jobs."""
        if self.kind in STUDIES:
            return " ".join((self.kind, *self.paths[1:]))
        return self.paths[-1] if self.kind == "openb" else Path(self.paths[-1]).name

    def fingerprint(self) -> list[object]:
        """Return values that identify the files and change with their content."""
        found: list[object] = [self.kind, self.split_large_jobs, *self.paths]
        for text in self.paths:
            path = Path(text)
            files = sorted(path.rglob("*.*")) if path.is_dir() else [path] if path.is_file() else []
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
    solver: str = "highs"

    def fingerprint(self) -> str:
        """Return all that decides the result, as text."""
        return json.dumps(
            [FORMAT, self.source.fingerprint(), self.policy, self.order, self.seed, self.quotas, self.solver]
        )

    @property
    def name(self) -> str:
        return self.policy if has_no_order(self.source, self.policy) else f"{self.policy}, {self.order}"


def has_no_order(source: Source, policy: str) -> bool:
    """Return True if queue orders play no part: nothing waits in openb, and round policies rank all jobs."""
    return source.kind == "openb" or is_round_policy(policy)


def cases(
    source: Source,
    policies: Sequence[str],
    orders: Sequence[str],
    seeds: Sequence[int],
    quotas: tuple[tuple[str, float], ...] = (),
    solver: str = "highs",
) -> list[Case]:
    """Return every combination that can differ: not all policies heed an order, few take a seed."""
    found: list[Case] = []
    for policy in policies:
        in_rounds = is_round_policy(policy)
        for order in orders[:1] if has_no_order(source, policy) else orders:
            draws = source.kind == "openb" or (not in_rounds and takes_seed(get_policy(policy)))
            found += [
                Case(source, policy, order, seed, quotas, solver) for seed in (seeds if draws else seeds[:1])
            ]
    return found


def cases_as_values(
    source: Source, policies: Sequence[str], orders: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the cases as JSON values, for callers that distribute the runs themselves."""
    return [asdict(case) for case in cases(source, policies, orders, seeds)]


def case_from_values(values: Mapping[str, Any]) -> Case:
    """Return the case that `cases_as_values` wrote."""
    named = values["source"]
    source = Source(named["kind"], tuple(named["paths"]), named["split_large_jobs"])
    quotas = tuple((team, share) for team, share in values["quotas"])
    return Case(source, values["policy"], values["order"], values["seed"], quotas, values["solver"])


def check(
    source: Source,
    policies: Sequence[str],
    orders: Sequence[str],
    seeds: Sequence[int],
    solver: str = "highs",
) -> None:
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
        if is_round_policy(policy):
            rounds_of(source, policy, solver)
        else:
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
        nodes, jobs = map(Path, source.paths)
        return read_workload(nodes, jobs, split_large_jobs=source.split_large_jobs)
    if source.kind in STUDIES:
        return study_workload(source.kind, source.paths)
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
    if is_round_policy(case.policy):
        rounds = rounds_of(case.source, case.policy, case.solver)
        rounds.run()
        return {"case": {**head, "in_rounds": True}, "summary": summarise(rounds), **curves(rounds)}
    record = play(read(case.source), case.policy, case.order, case.seed, dict(case.quotas))
    return {"case": head, "summary": metrics.summarise(record), **curve_data(record)}


def rounds_of(source: Source, policy: str, solver: str) -> Rounds:
    """Return the replay in rounds of any workload, ready to run."""
    chosen = get_round_policy(policy, solver)
    if source.kind in STUDIES:
        return study(source.kind, source.paths, chosen)
    return timed_rounds(read(source), chosen)


def play(workload: Workload, policy: str, order: str, seed: int, quotas: dict[str, float]) -> Record:
    """Return the record of one replay of a workload with run times."""
    return Replay(workload, get_policy(policy, seed=seed), get_order(order, quotas)).run()
