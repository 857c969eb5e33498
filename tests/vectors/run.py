"""Decide the published cases of public schedulers with our core, and compare: `python -m tests.vectors.run`.

A case has servers, teams and jobs, and what became of each job. Running jobs are leases, pending ones are
queued in the order of their arrival; then passes over the queue follow, and each lease that is preempted is
released at once, until nothing changes. One pass more must change nothing.

The originals let a small job pass a large one that does not fit. Here that is backfill, which needs runtimes:
all running jobs run for a day and all pending ones for a second, so that none of them delays one before it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from resource_manager.core.changes import (
    Outcome,
    Preempting,
    Queued,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Placement, Request, Spread
from resource_manager.core.team_ledger import Use
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import ResourceManagerError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import BACKFILL_SUFFIX, QueueDiscipline, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "vectors"
"""Folder of the cases, beside the repository; they are not part of it."""

NOW = 1_000_000.0
MAX_PASSES = 8
RUNNING_S, PENDING_S = 86_400.0, 1.0
ANY = 1_000_000
"""Guarantee of a team that has no bound."""

BEST_FIT = get_policy("best_fit")
REQUEST_FIELDS = {field.name for field in fields(Request)}
LEASE_FIELDS = {field.name for field in fields(Lease)}

REASONS: dict[str, str] = {
    "kueue: quota of groups (hierarchical)": "Kueue's groups own quota; a guarantee here covers a subtree",
}
"""Case or class -> reason why we decide differently, for those where we do."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A job of which we decide otherwise; `reason` is empty for a defect."""

    case_id: str
    class_: str
    job: str
    expected: str
    got: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        names = ("case_id", "class_", "job", "expected", "got", "reason")
        keys = ("id", "class", "job", "expected", "got", "reason")
        return {key: getattr(self, name) for key, name in zip(keys, names, strict=True)}


class Case:
    """One case: its state, and the passes over it."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case
        self.cluster = ClusterState(_nodes(case["nodes"]))
        self.lost: set[str] = set()
        self._used: dict[str, Counter[int]] = {}
        self._groups: dict[tuple[str, str], int] = {}
        used = {
            team["name"]: Use(float(sum(team.get("usage_now", {}).values())), NOW) for team in case["teams"]
        }
        self.cluster.apply(TeamsChanged(_teams(case), NOW))
        self._running = {job["name"] for job in case["jobs"] if _is_running(job)}
        arrivals = sorted(case["jobs"], key=lambda job: job.get("queued_at_s", 0))
        places = {job["name"]: number for number, job in enumerate(arrivals, 1)}
        running = sorted(filter(_is_running, case["jobs"]), key=lambda job: job.get("running_since_s", 0))
        held = [self._held(job, places[job["name"]], token) for token, job in enumerate(running, 1)]
        # Restored, not granted: what runs may be more than there is.
        self.cluster = ClusterState.from_snapshot(
            replace(
                self.cluster.snapshot(),
                leases=tuple(held),
                last_fencing_token=len(held),
                sequence=len(held),
                use=used,
            )
        )
        for number, job in enumerate(arrivals, 1):
            if not _is_running(job):
                at = NOW + job.get("queued_at_s", 0)
                self.cluster.apply(Queued(self._request(job), at, number, at))

    def decide(self) -> None:
        """Pass over the queue until nothing changes."""
        order = _order(self.case["settings"])
        for _ in range(MAX_PASSES):
            if not self.pass_over(order):
                break

    def pass_over(self, order: QueueDiscipline) -> bool:
        """Return True if one pass over the queue, and the release of what it preempts, changed anything."""
        changes = allocator.schedule_pending(self.cluster, SchedulingPass(BEST_FIT, order, NOW))
        for change in changes:
            self.cluster.apply(change)
        for change in changes:
            if not isinstance(change, Preempting):
                continue
            self.lost.add(change.lease_id)
            ended = lease_steps.release(self.cluster, change.lease_id, NOW, outcome=Outcome.PREEMPTED)
            for step in allocator.with_dispatch(self.cluster, ended, SchedulingPass(BEST_FIT, order, NOW)):
                self.cluster.apply(step)
        return bool(changes)

    def outcomes(self) -> dict[str, str]:
        """Return what became of each job: stays, evicted, starts or waits."""
        found: dict[str, str] = {}
        for job in self.case["jobs"]:
            name = job["name"]
            if name in self._running:
                found[name] = "evicted" if name in self.lost else "stays"
            else:
                found[name] = "starts" if name in self.cluster.leases and name not in self.lost else "waits"
        return found

    def differences(self) -> Iterable[tuple[str, str, str]]:
        """Yield each job that differs, with what was expected and what we decided."""
        got = self.outcomes()
        for job, expected in self.case["expected"]["outcome"].items():
            if got.get(job) != expected:
                yield job, expected, got.get(job, "no such job")
        for job in self.case["jobs"]:
            label, lease = job.get("same_required"), self.cluster.leases.get(job["name"])
            if label and lease is not None:
                nodes = [self.cluster.by_name[member.node].node for member in lease.members]
                values = {node.labels.get(label, "none") for node in nodes}
                if len(values) > 1:
                    yield job["name"], f"one value of {label}", ", ".join(sorted(values))
        before = got
        self.pass_over(_order(self.case["settings"]))
        for job, last in self.outcomes().items():
            if last != before[job]:
                yield job, f"{before[job]} for good", last

    def places(self) -> tuple[int, int]:
        """Return of how many jobs the servers are as expected, and of how many they are stated."""
        stated = {
            job: sorted(nodes)
            for job, nodes in self.case["expected"].get("nodes", {}).items()
            if job in self.cluster.leases and None not in nodes
        }
        got = {job: sorted(member.node for member in self.cluster.leases[job].members) for job in stated}
        return sum(got[job] == nodes for job, nodes in stated.items()), len(stated)

    def _request(self, job: Mapping[str, Any], *, running: bool = False) -> Request:
        # A member with fractions of several GPUs counts as so many members.
        members = len(job["members"]) * (max(job["gpus"], 1) if job.get("gpu_milli") else 1)
        resources = {
            name: job[name]
            for name in ("cpus", "memory_bytes")
            if name in job and all(name in node for node in self.case["nodes"])
        }
        optional = {"preemption_delay_s": float(job.get("preemption_delay_s", 0)), "preempt_grace_s": 0.0}
        return Request(
            job["name"],
            1 if job.get("gpu_milli") else job["gpus"],
            gpu_milli=job.get("gpu_milli") or MILLI_PER_GPU,
            resources=resources,
            priority=job["priority"],
            team=job["team"],
            preemptible=job["preemptible"],
            expected_runtime_s=RUNNING_S if running else PENDING_S,
            nodes=members,
            spread=Spread.PACK if members > 1 else Spread.SERVERS,
            same="" if running else job.get("same_required", ""),
            prefer_same="" if running else job.get("same_preferred", ""),
            **{name: value for name, value in optional.items() if name in REQUEST_FIELDS},  # type: ignore[arg-type]
        )

    def _held(self, job: Mapping[str, Any], arrival: int, token: int) -> Lease:
        request = self._request(job, running=True)
        return Lease(
            request,
            tuple(placed for member in job["members"] for placed in self._placements(job, request, member)),
            token,
            NOW + job.get("running_since_s", 0),
            queued_at=NOW + job.get("queued_at_s", 0),
            quarantined=any(member["state"] == "stuckinreleasing" for member in job["members"]),
            **({"sequence": arrival} if "sequence" in LEASE_FIELDS else {}),  # type: ignore[arg-type]
        )

    def _placements(
        self, job: Mapping[str, Any], request: Request, member: Mapping[str, Any]
    ) -> Iterable[Placement]:
        node = member["node"]
        if request.gpu_milli == MILLI_PER_GPU:
            yield Placement(node, tuple(self._next_gpu(node) for _ in range(request.gpus)))
            return
        count = max(job["gpus"], 1)
        own = [f"{request.lease_id} {len(self._groups)} {number}" for number in range(count)]
        for group in [*(member.get("gpu_groups") or ()), *own][:count]:
            if (node, group) not in self._groups:
                self._groups[node, group] = self._next_gpu(node)
            yield Placement(node, (self._groups[node, group],))

    def _next_gpu(self, node: str) -> int:
        """Return the GPU of the node that was given out least often."""
        used = self._used.setdefault(node, Counter(dict.fromkeys(self.cluster.by_name[node].gpu_free, 0)))
        gpu_id = min(used, key=lambda gpu_id: (used[gpu_id], gpu_id), default=0)
        used[gpu_id] += 1
        return gpu_id


def _is_running(job: Mapping[str, Any]) -> bool:
    return all(member["state"] != "pending" for member in job["members"])


def _nodes(rows: Iterable[Mapping[str, Any]]) -> Iterable[Node]:
    for number, row in enumerate(sorted(rows, key=lambda row: row["name"])):
        resources = {name: row[name] for name in ("cpus", "memory_bytes") if name in row}
        gpus = tuple(Gpu(gpu_id) for gpu_id in range(row["gpus"]))
        yield Node(row["name"], number, resources, gpus, row["name"], labels=row.get("labels", {}))


def _teams(case: Mapping[str, Any]) -> Teams:
    return Teams(
        tuple(
            Team(
                row["name"],
                ANY if row["guarantee_gpus"] < 0 else row["guarantee_gpus"],
                limit=row.get("limit_gpus"),
                weight=row.get("weight", row.get("over_quota_weight", 1)),
                parent=row.get("parent") or "",
                min_runtime_s=row.get("reclaim_min_runtime_s"),
            )
            for row in case["teams"]
        ),
        preemption=True,
        min_runtime_s=0.0,
        preemption_delay_s=0.0,
    )


def _order(settings: Mapping[str, Any]) -> QueueDiscipline:
    return get_order(settings.get("order", "priority") + BACKFILL_SUFFIX)


def _decided(data: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], tuple[int, int]]:
    """Decide a case; return its differences, and on how many servers it agrees."""
    try:
        case = Case(data)
        case.decide()
        places = case.places()
        return list(case.differences()), places
    except (ResourceManagerError, LookupError, TypeError, ValueError) as error:
        return [("", "a case of the format", f"{type(error).__name__}: {error}")], (0, 0)


def compare(folder: Path) -> dict[str, Any]:
    """Decide every case in the folder; return how many agree, by aim and class, and each deviation."""
    report: dict[str, Any] = {"agree": 0, "of": 0, "by_class": {}, "deviations": []}
    report["optional"] = {"agree": 0, "of": 0, "by_class": {}, "deviations": []}
    right, stated = 0, 0
    for path in sorted(folder.glob("*.json")):
        for data in json.loads(path.read_text(encoding="utf-8"))["cases"]:
            differences, placed = _decided(data)
            right, stated = right + placed[0], stated + placed[1]
            part = report if data["aim"] == "agree" else report["optional"]
            reason = REASONS.get(data["id"], REASONS.get(data["class"], ""))
            deviations = [
                Deviation(data["id"], data["class"], job, expected, got, reason).as_dict()
                for job, expected, got in differences
            ]
            of_class = part["by_class"].setdefault(data["class"], [0, 0])
            for counts, place in ((of_class, 0), (of_class, 1)):
                counts[place] += place or not deviations
            part["agree"] += not deviations
            part["of"] += 1
            part["deviations"] += deviations
    report["nodes"] = [right, stated]
    return report


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; return 0 if all cases of aim `agree` do, or have a reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.vectors.run", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DATA, help="folder of the cases")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args(arguments)
    if not any(options.folder.glob("*.json")):
        parser.error(f"no cases (*.json) in {options.folder}")
    report = compare(options.folder)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for title, part in (("", report), ("optional: ", report["optional"])):
            print(f"{title}{part['agree']} of {part['of']} agree")
            for name, (agree, of) in sorted(part["by_class"].items()):
                print(f"  {agree:3} of {of:3}  {name}")
            for each in part["deviations"]:
                print(
                    f"  {each['id']}: {each['job']}: {each['expected']}, got {each['got']} {each['reason']}"
                )
        print(f"servers of running jobs as stated: {report['nodes'][0]} of {report['nodes'][1]}")
    return 0 if all(each["reason"] for each in report["deviations"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
