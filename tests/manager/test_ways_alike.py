"""The same random calls on a store, over HTTP and with asyncio are answered alike, refusals included."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, JobPlace
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.lease_service import LeaseService
from resource_manager.storage import open_store
from tests.manager import test_service_contract
from tests.manager.test_service_contract import awaited, on_store, over_http

IDS = ["a", "b", "dag/run/t", "dag/run/t/0", "x y", "é", "a/b", "a?b#c", "%41", "..", "0", "n" * 300]
SERVERS = [0, 1, 9, "0", "gpu-server-0", "gpu-server-1", "GPU-SERVER-0", "nope"]
FIELDS: dict[str, list[Any]] = {
    "cpus": [1, 8, 64, 0, 65, 2.5, "x"],
    "gpu_milli": [100, 500, 1001],
    "nodes": [1, 2, 3, 0],
    "priority": [5, -3, "high"],
    "server": SERVERS,
    "prefer_server": SERVERS,
    "team": ["vision", "x" * 300],
    "ttl": [60, "10min", "soon"],
    "expected_runtime": [3600, "2h"],
    "gpu_types": [["A100"], ["H100"], [""]],
    "vendor": ["nvidia", "amd", "x"],
    "labels_required": [{"rack": "1"}],
    "resources": [{"disk": 1}, {"cpus": 2}],
    "quarantine": [True],
    "spread": ["pack", "wide"],
    "required_gpus": [2, 3],
    "gpu_memory": ["40GiB", "much"],
    "misspelt": [1],
}
OF_THE_TIME = re.compile(
    r"(_at|_at_s|_s|short_id|_by|_by_owner)$|^(age|at|by|owner|seen|until|earliest|latest)$"
)
"""Names of values that are of the moment, or of who asks: a service calls who does not log in anonymous."""


def comparable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {name: comparable(each) for name, each in value.items() if not OF_THE_TIME.search(str(name))}
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    return value


def answer(service: LeaseService, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return comparable(getattr(service, name)(*args, **options))
    except ResourceManagerError as error:
        if name == "try_allocate_batch":
            return "refused"  # for the first wrong value, which a service finds in all items before the rest
        return type(error).__name__, str(error).replace("'", "")  # in a query each value is a text


def calls(rng: random.Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return a method of `LeaseService` with arguments, some of which are wrong."""

    def name() -> str:
        return rng.choice(IDS[:4] if rng.random() < 0.8 else IDS)

    def demand() -> dict[str, Any]:
        fields = rng.sample(sorted(FIELDS), rng.choice((0, 0, 1, 2)))
        return {field: rng.choice(FIELDS[field]) for field in fields}

    def item() -> dict[str, Any]:
        return {"lease_id": name(), "gpus": rng.choice((1, 2, 8)), **demand()}

    token = rng.choice((1, 2, 3, 5))
    gpus = tuple(Gpu(number) for number in range(rng.choice((0, 2, 8))))
    kinds: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
        "submit": lambda: ((name(), rng.choice((1, 2, 3, 8, 9, -1))), demand()),
        "try_allocate": lambda: ((name(), rng.choice((1, 2, 4, 0))), demand()),
        "try_allocate_batch": lambda: (([item() for _ in range(rng.choice((0, 1, 3)))],), {}),
        "explain": lambda: ((name(), 2), demand()),
        "release": lambda: ((name(),), rng.choice(({}, {"fencing_token": token}, {"job_end": "ended"}))),
        "renew": lambda: ((name(),), rng.choice(({}, {"fencing_token": token}, {"for_s": 10}))),
        "place_job": lambda: ((name(), [JobPlace("ssh", machine="m", user="u")]), {"fencing_token": token}),
        "release_members": lambda: ((name(), [rng.choice((0, 1, 5))]), {"fencing_token": token}),
        "preempt": lambda: ((name(),), {"dry_run": rng.random() < 0.5, "preemptor": name()}),
        "cancel": lambda: ((name(),), {"reason": "tired"}),
        "announce": lambda: ((name(), 2), {"after": ["a"], **demand()}),
        "withdraw": lambda: (([name()],), {}),
        "drain": lambda: ((rng.choice(SERVERS), rng.choice((None, 3, 99))), {"reason": "fans"}),
        "resume": lambda: ((rng.choice(SERVERS), rng.choice((None, None, 3))), {}),
        "adopt": lambda: ((rng.choice(SERVERS), gpus), {}),
        "history": lambda: ((), rng.choice(({}, {"after": 3}, {"what": "grant"}))),
        **{each: lambda: ((name(),), {}) for each in ("status_of", "named", "explain_named", "result_of")},
        **{each: lambda: ((), {}) for each in ("leases", "queue", "servers", "teams", "coming", "gpus")},
    }  # fmt: skip
    kind = rng.choice([*kinds, "submit", "submit", "try_allocate", "release"])
    return kind, *kinds[kind]()


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_is_answered_alike_on_every_way(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    url = f"sqlite:///{tmp_path / 'state.db'}"
    with closing(open_store(url)) as empty:  # its fencing tokens begin with 1, too
        empty.initialise(ClusterState(test_service_contract.SERVERS).snapshot())
    with ExitStack() as stack:
        store = stack.enter_context(on_store("memory://"))
        others = [
            stack.enter_context(over_http("memory://", tmp_path)),
            stack.enter_context(awaited(url)),
        ]
        for step in range(60):
            call = calls(rng)
            expected = answer(store, *call)
            for other in others:
                assert answer(other, *call) == expected, (step, call)
