"""Policies and queue orders side by side on one workload: the runs of a comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from resource_manager.core.teams import NO_TEAMS, Teams, check_teams
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.positions import dotted
from resource_manager.manager.cluster_file.reading import ClusterFiles, load_teams
from resource_manager.scheduling.placement.policies import ENTRY_POINT_GROUP, get_policy, takes_seed
from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from resource_manager.scheduling.queue.orders import get_order
from simulator.errors import InputError, SimulationError
from simulator.progress import Progress, no_progress
from simulator.replay import metrics, openb
from simulator.replay.history import read_history, workload_of
from simulator.replay.job_runs import Record
from simulator.replay.replay import CHECKPOINT_S, Replay
from simulator.replay.workload import Workload, read_workload
from simulator.rounds.policies import ENTRY_POINT_GROUP as ROUND_GROUP
from simulator.rounds.policies import get_round_policy, is_round_policy
from simulator.rounds.record import Rounds, curves, summarise
from simulator.rounds.studies import STUDIES, study, study_workload
from simulator.rounds.timed import RESIZES, timed_rounds

FORMAT = 10
"""Version of a kept result; a result of another version is run again."""

FILES = {
    "openb": ("csv/*.csv", "fixtures/*.json.gz"),
    "pollux": ("applications.json", "applications/*/*.csv", "workloads/*/*.csv"),
    "shockwave": ("jobs.json", "throughputs.json", "gns.json"),
}
"""Kind of a source -> the files that its folder is read from; results may be written beside them."""


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
        """The workload in a title: the study with its workload, or the file of the jobs."""
        if self.kind in STUDIES:
            return " ".join((self.kind, *self.paths[1:]))
        return f"openb {self.paths[-1]}" if self.kind == "openb" else Path(self.paths[-1]).name

    def fingerprint(self) -> list[object]:
        """Return values that identify the files and change with their content."""
        found: list[object] = [self.kind, self.split_large_jobs, *self.paths]
        for text in self.paths:
            path = Path(text)
            found += _stamps(each for pattern in FILES.get(self.kind, ()) for each in path.glob(pattern))
            found += _stamps([path] if path.is_file() else [])
        return found


def _stamps(files: Iterable[Path]) -> list[object]:
    """Return each file, in order, with its size and the time of its last change."""
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]


def _code_of(policy: str) -> list[object]:
    """Return the files of the package that brings a policy by an entry point; none of a built-in policy."""
    points = (point for group in (ENTRY_POINT_GROUP, ROUND_GROUP) for point in entry_points(group=group))
    packages = {point.module.partition(".")[0] for point in points if point.name == policy}
    found: list[object] = []
    for spec in filter(None, map(find_spec, sorted(packages))):
        for root in map(Path, spec.submodule_search_locations or [spec.origin or ""]):
            found += _stamps(root.rglob("*.py") if root.is_dir() else [root] if root.is_file() else [])
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
    teams: str = ""
    preemption: bool = False
    checkpoint_s: float = CHECKPOINT_S

    def fingerprint(self) -> str:
        """Return all that decides the result, as text."""
        own = [self.policy, _code_of(self.policy), self.order, self.seed, self.quotas, self.solver]
        teams = Path(self.teams).read_text(encoding="utf-8") if self.teams else ""
        rules = [self.preemption, teams, self.checkpoint_s]
        return json.dumps([FORMAT, self.source.fingerprint(), *own, *rules])

    @property
    def name(self) -> str:
        if has_no_order(self.source, self.policy):
            return self.policy
        how = f", {'with' if self.preemption else 'without'} preemption" if self.teams else ""
        return f"{self.policy}, {self.order}{how}"

    @property
    def rules(self) -> Teams | None:
        """The rules of the teams file, with preemption on or off as this case has it; None without a file."""
        return replace(load_teams(self.teams), preemption=self.preemption) if self.teams else None


def has_no_order(source: Source, policy: str) -> bool:
    """Return True if queue orders play no part: nothing waits in openb, and round policies rank all jobs."""
    return source.kind == "openb" or is_round_policy(policy)


def draws(source: Source, policy: str) -> bool:
    """Return True if the result depends on the seed: the order of arrivals in openb, some policies."""
    return source.kind == "openb" or (not is_round_policy(policy) and takes_seed(get_policy(policy)))


def cases(
    source: Source,
    policies: Sequence[str],
    orders: Sequence[str],
    seeds: Sequence[int],
    quotas: tuple[tuple[str, float], ...] = (),
    solver: str = "highs",
    teams: str = "",
    checkpoint_s: float = CHECKPOINT_S,
) -> list[Case]:
    """Return every combination that can differ: not all policies heed an order, few take a seed.

    With a teams file each comes without preemption and, if the file turns it on, with it.
    """
    found: list[Case] = []
    for policy in policies:
        for order in orders[:1] if has_no_order(source, policy) else orders:
            rules = "" if has_no_order(source, policy) else teams
            preempts = (False, True) if rules and load_teams(rules).preemption else (False,)
            found += [
                Case(source, policy, order, seed, quotas, solver, rules, preemption, checkpoint_s)
                for preemption in preempts
                for seed in (seeds if draws(source, policy) else seeds[:1])
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
    own = {key: values[key] for key in values if key not in ("source", "quotas")}
    return Case(source, quotas=quotas, **own)


def check(
    source: Source,
    policies: Sequence[str],
    orders: Sequence[str],
    seeds: Sequence[int],
    solver: str = "highs",
    teams: str = "",
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
    workload = read(source)
    if teams:
        types = Counter(gpu.gpu_type for node in workload.last_nodes for gpu in node.gpus)
        files = ClusterFiles([teams])
        for team, field, reason in check_teams(files.definition.teams or NO_TEAMS, types):
            raise files.located(
                InvalidRequestError(
                    "team {!r}: {}: {}", team, field, reason, field=dotted(("teams", team, field))
                )
            )


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


def head_of(case: Case) -> dict[str, Any]:
    """Return the name and the settings of a run, as JSON values."""
    return {"name": case.name, **{key: value for key, value in asdict(case).items() if key != "source"}}


def run_case(case: Case) -> dict[str, Any]:
    """Return the figures, curves and waits of one run, as JSON values."""
    head = head_of(case)
    if case.source.kind == "openb":
        trace = _read_openb(*case.source.paths, case.seed)
        summary, rows = openb.replay(trace, case.policy, case.seed)
        return {"case": head, "summary": summary, "curve": openb.curve_of(rows)}
    if is_round_policy(case.policy):
        rounds = rounds_of(case.source, case.policy, case.solver)
        rounds.run()
        return {"case": {**head, "in_rounds": True}, "summary": summarise(rounds), **curves(rounds)}
    record = play(case)
    return {"case": head, "summary": metrics.summarise(record), **metrics.curve_data(record)}


def rounds_of(source: Source, policy: str, solver: str) -> Rounds:
    """Return the replay in rounds of any workload, ready to run."""
    chosen = get_round_policy(policy, solver)
    if source.kind in STUDIES:
        return study(source.kind, source.paths, chosen)
    if getattr(chosen, "resizes", False):
        raise SimulationError(f"{policy} {RESIZES}")
    return timed_rounds(read(source), chosen)


def play(case: Case, progress: Progress = no_progress) -> Record:
    """Return the record of one replay of a workload with run times."""
    policy, order = get_policy(case.policy, seed=case.seed), get_order(case.order, dict(case.quotas))
    return Replay(read(case.source), policy, order, case.rules, case.checkpoint_s).run(progress)
