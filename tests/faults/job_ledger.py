"""Ledger that jobs of agents write, and what it shows beside the history of the state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resource_manager.core.changes import Change, Granted, MembersReleased, Outcome, Preempting, Released
from tests.faults.terminals import check_ledger

SAFETY_S = 0.3
"""Most by which the time of a change is before that of its commit: `MAX_SAFETY_S`, and the answer's way."""

JOB = """
id=$(cat /proc/sys/kernel/random/uuid)
beat() {{
  echo "$GPU_LEASE_FENCING_TOKEN ${{GPU_NODE_RANK:-0}} $id $(readlink /proc/self/ns/pid) $GPU_SERVER" \\
    "$GPU_LEASE_GPUS $1 $(date +%s.%N)" >> {ledger}
}}
n=0
while [ $n -lt {beats} ]; do beat run; n=$((n + 1)); sleep 0.1; done
beat {code}
exit {code}
"""


@dataclass(frozen=True, slots=True)
class Beat:
    """Line of the ledger: a process of a lease's member that ran then; `code` is that of one about to end."""

    token: int
    rank: int
    process: str
    namespace: str
    server: str
    gpus: str
    code: int | None
    at: float

    @classmethod
    def read(cls, path: Path) -> list[Beat]:
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [
            cls(
                int(token),
                int(rank),
                name,
                space,
                server,
                gpus,
                None if code == "run" else int(code),
                float(at),
            )
            for token, rank, name, space, server, gpus, code, at in lines
        ]


def check_jobs(
    beats: Sequence[Beat],
    changes: Sequence[Change],
    results: Mapping[int, Mapping[str, Any]],
    hurt: Iterable[int],
    walls: Mapping[str, bool],
) -> list[str]:
    """Return what the ledger shows of jobs beside what the history says.

    `results` are the stored ends by fencing token, `hurt` the leases of whose jobs a process was killed, and
    `walls` says of each server whether its jobs are in a namespace of their own.
    """
    as_dicts = [
        {"process": f"{each.token}-{each.process}", "server": each.server, "gpus": each.gpus, "at": each.at}
        for each in beats
    ]
    complaints = check_ledger(as_dicts, changes)
    processes: dict[tuple[int, int], set[str]] = defaultdict(set)
    codes: dict[int, dict[int, int]] = defaultdict(dict)
    last: dict[int, float] = {}
    for beat in beats:
        processes[beat.token, beat.rank].add(beat.process)
        last[beat.token] = max(beat.at, last.get(beat.token, 0.0))
        if beat.code is not None:
            codes[beat.token][beat.rank] = beat.code
        is_walled = beat.namespace != os.readlink("/proc/self/ns/pid")
        if is_walled != walls[beat.server]:
            complaints.append(
                f"the job of lease {beat.token} ran {'within' if is_walled else 'outside'} walls"
            )
    for (token, rank), names in processes.items():
        if len(names) > 1:
            complaints.append(f"rank {rank} of lease {token} was started {len(names)} times")
    nodes = {c.lease.fencing_token: c.lease.request.nodes for c in changes if isinstance(c, Granted)}
    ended_in_parts = {c.fencing_token for c in changes if isinstance(c, MembersReleased)}
    disturbed = {c.fencing_token for c in changes if isinstance(c, Preempting)} | {*hurt} | ended_in_parts
    for change in changes:
        if not isinstance(change, Released):
            continue
        token, own = change.fencing_token, codes[change.fencing_token]
        if last.get(token, 0.0) > change.at + SAFETY_S:
            complaints.append(f"the job of lease {token} still ran when it was released")
        has_succeeded = len(own) == nodes[token] and not any(own.values())
        if change.outcome == Outcome.SUCCESS and not has_succeeded:
            complaints.append(f"lease {token} ended well, and its job did not")
        if has_succeeded and token not in disturbed and change.outcome != Outcome.SUCCESS:
            complaints.append(f"lease {token} ended as {change.outcome}, and its job ended well")
        code = results.get(token, {}).get("exit_code")
        if code is not None and code < 128 and code not in own.values():
            complaints.append(f"the job of lease {token} is said to have ended with {code}")
    return list(dict.fromkeys(complaints))
