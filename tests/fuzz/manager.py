"""The parsers of the manager: its files, its settings, its stores, and what its service is sent."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ValidationError

from resource_manager import GPUResourceManager
from resource_manager.core.changes import AgentSeen, GpuClosed, GpuOpened
from resource_manager.core.teams import check_teams
from resource_manager.errors import redact
from resource_manager.manager.cluster_file.reading import ClusterFiles, load_inventory, load_teams
from resource_manager.rest import schemas as bodies
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.limits import FixedWindow
from resource_manager.rest.problems import from_validation
from resource_manager.rest.tokens import TokenFile
from resource_manager.settings import Settings
from resource_manager.storage import codec
from resource_manager.storage.airflow_variable import document
from resource_manager.storage.backup import read_backup, write_backup
from resource_manager.storage.codec import change_from_json
from resource_manager.storage.history_file import collect, write_file
from resource_manager.storage.redis import layout
from resource_manager.storage.redis.client import RedisClient
from simulator.errors import InputError
from simulator.replay.history import read_history, workload_of
from tests.fuzz.parser import Parser, file

INVENTORY = b"""[[servers]]
name = "gpu-{id}"
count = 2
cpus = 64
memory_mib = 1024
address = "a@h:22"
gpus = [{ count = 4, type = "A100", memory_mib = 40960 }, { ids = [7], vendor = "amd" }]
labels = { rack = "1" }
[[servers]]
name = "cpu"
cpus = 8
resources = { disk_gb = 1.5 }
"""
TEAMS = b"""preemption = true
min_runtime = "10min"
gpu_weights = { A100 = 2.0 }
[teams.vision]
guaranteed = { A100 = 4 }
limit = 6
max_runtime = "3d"
[teams."vision two"]
parent = "vision"
max_gpus_per_owner = 1.5
idle_after = 60
"""
CLUSTER = b"""[cluster] # as stated
policy = 'best_fit'
order="fair_tree+backfill"
lease_ttl = "12h"
prices = { A100 = 2.5, "H 100" = 4 }
[[servers]]
name = "a\\u0062"
gpus = [ { count = 2, type = '''H100''' } ]
cpus = 8
[[maintenance]]
servers = ["ab"]
from = 2126-12-01T08:00:00+01:00
until = "2126-12-01T12:00+01:00"
every = "week"
[health."xid 63"]
action = "note"
"""
BODIES: tuple[tuple[type[BaseModel], bytes], ...] = (
    (
        bodies.AllocateBody,
        b'{"task_id": "t", "required_gpus": 1, "required_cpus": 4, "gpu_milli": 300, "labels": {"a": "b"}, '
        b'"ttl": 60, "resources": {"memory_mib": 5.5}, "gpu_types": ["A100"], "utility": 1, "target": 2}',
    ),
    (
        bodies.BatchBody,
        b'{"requests": [{"task_id": "t", "required_gpus": 2, "required_cpus": 4, "prefer_server_id": 1}, '
        b'{"task_id": "u", "gpus": 2, "cpus": 4, "prefer_server": "a", "server": 1}]}',
    ),
    (bodies.LeaseBody, b'{"task_id": "t", "fencing_token": 3}'),
    (bodies.DrainBody, b'{"reason": "fan", "failed": true}'),
    (bodies.ResetBody, b'{"confirm": true}'),
    (bodies.ReleaseBody, b'{"task_id": "t", "fencing_token": 3, "ranks": [0, 2], "outcome": "x"}'),
    (bodies.RenewBody, b'{"task_id": "t", "checkpoint_at": 1.5}'),
    (bodies.PreemptBody, b'{"task_id": "t", "preemptor": "u", "dry_run": true}'),
    (bodies.AdoptBody, b'{"gpus": [{"gpu_id": 0, "uuid": "GPU-1", "type": "A100", "memory_mib": 40960}]}'),
    (bodies.ResumeBody, b'{"gpu": "GPU-1"}'),
    (bodies.SearchedBody, b'{"jobs": ["gpu-t-0a1b2c3d-7"], "age_s": 1.5}'),
    (
        bodies.ClusterBody,
        b'{"sections": {"preemption": true, "cluster": {"order": "fifo"}, '
        b'"servers": [{"name": "a", "cpus": 2}], '
        b'"teams": {"a": {"guaranteed": {"A100": 2}, "max_runtime": "3d"}}, "health": {"xid 63": "note"}}, '
        b'"remove": ["health"], "revision": "a", "dry_run": true}',
    ),
    (
        bodies.MaintenanceBody,
        b'{"servers": [0, "b"], "from": "2126-12-01T08:00+01:00", "until": "2126-12-02T08:00Z", '
        b'"every": "week", "reason": "fans", "preempt": true}',
    ),
)


def read_body(model: type[BaseModel]) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            problem = from_validation(error)
            raise InputError(problem.detail) from error

    return parse


@cache
def manager_with_everything() -> GPUResourceManager:
    """Leases, shares, a queue, closed GPUs, some in cleaning, and a history."""
    manager = GPUResourceManager.from_url("memory://")
    for number in range(4):
        manager.allocate_resources(f"t{number}", 6, 8, team="a", labels={"k": "v"}, quarantine=True)
    manager.allocate_resources("share", 1, 1, gpu_milli=300, ttl=50)
    manager.submit("waits", 8, 8, utility=1.0, target=5.0, expected_runtime=9.0)
    manager.renew("t1")
    manager.drain(3, reason="fan")
    manager.release_resources("t0", outcome="SUCCESS")
    manager.resume(3)
    name = "gpu-server-1"
    manager.commit(lambda cluster, now: [AgentSeen(name, now), GpuClosed(name, 7, "", "xid 79", now)])
    manager.release_resources("t1")
    manager.commit(lambda cluster, now: [GpuClosed(name, 6, "", "xid 48", now), GpuOpened(name, 6, now)])
    return manager


def example_document() -> bytes:
    cluster = manager_with_everything().store.refresh(None)
    assert cluster is not None
    return document.to_json(document.Document(cluster, "epoch", "commit"), 1e9).encode()


ORIGINAL_DOCUMENT = json.dumps(
    {
        "servers": [
            {
                "server_id": 0,
                "server_name": "gpu-server-0",
                "total_gpus": 8,
                "available_gpus": [2, 3],
                "total_cpus": 64,
                "available_cpus": 60,
                "running_tasks": [
                    {
                        "task_id": "t",
                        "allocated_gpus": [0, 1],
                        "allocated_cpus": 4,
                        "start_time": "2026-01-01T00:00:00+00:00",
                    }
                ],
            }
        ]
    }
).encode()


def read_redis(data: bytes, folder: Path) -> object:
    """Inventory, three numbers and nine hashes, as refresh.lua answers; parts end at NUL, pairs at tab."""
    parts = data.split(b"\0")
    parts += [b""] * (13 - len(parts))
    inventory = layout.inventory_from_json(b"1", parts[0])
    hashes = [part.split(b"\t") if part else [] for part in parts[4:13]]
    pairs = [flat[: len(flat) // 2 * 2] for flat in hashes]
    return layout.read_state(1, [*parts[1:4], *pairs], inventory)


def example_redis() -> bytes:
    cluster = manager_with_everything().store.refresh(None)
    assert cluster is not None
    snapshot = cluster.snapshot()
    hashes: dict[str, list[str]] = {}
    parts = layout.parts_of(snapshot)
    for part, field, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        hashes.setdefault(part, []).extend((field, text))
    names = ("lease", "renewal", "quarantined", "pending", "drained", "rule", "gpu", "port", "preempting")
    held = ["\t".join(hashes.get(name, [])) for name in names]
    return "\0".join([layout.inventory_to_json(snapshot), "9", "9", "", *held]).encode()


def read_changes(data: bytes, folder: Path) -> object:
    return [change_from_json(line) for line in data.splitlines()]


def example_history(folder: Path) -> bytes:
    write_file(collect(manager_with_everything()), folder / "h.jsonl")
    return (folder / "h.jsonl").read_bytes()


def parse_history(path: Path) -> object:
    return workload_of(read_history(str(path)), "h")


def read_environment(data: bytes, folder: Path) -> object:
    """NAME=VALUE lines, and the rest of the bytes as the file that GPU_MANAGER_SETTINGS names."""
    lines, _, rest = data.partition(b"\n\n")
    text = lines.decode("utf-8", "surrogateescape").replace("\0", "")
    environment = dict(line.partition("=")[::2] for line in text.split("\n"))
    if rest:
        (folder / "settings.toml").write_bytes(rest)
        environment["GPU_MANAGER_SETTINGS"] = str(folder / "settings.toml")
    settings = Settings.load(environment)
    repr(settings)
    return settings


def read_url(data: bytes, folder: Path) -> object:
    """A store's or a service's address; nothing is connected to."""
    url = data.decode("utf-8", "surrogateescape")
    redact(url)
    if url.startswith("http"):
        ServiceClient(url).close()
        return None
    with closing(RedisClient.from_url(url)) as client:
        return client.key("meta")


def read_backup_again(path: Path) -> object:
    """A state that is taken can be written again."""
    backup = read_backup(path)
    return codec.snapshot_to_dict(backup.snapshot)


def example_backup(folder: Path) -> bytes:
    manager = GPUResourceManager.from_url("memory://")
    manager.allocate_resources("t", 2, 8, labels={"k": "v"})
    write_backup(manager.store, folder / "e.json", [{"token_id": "a"}])
    return (folder / "e.json").read_bytes()


def read_teams(path: Path) -> object:
    """Rules that are taken can be applied to a cluster, or contradict it."""
    return list(check_teams(load_teams(path), {"A100": 8, "": 8}))


def read_cluster(path: Path) -> None:
    """A cluster that is taken is printed as a file that changes nothing."""
    with GPUResourceManager.from_url("memory://", inventory=()) as manager:
        manager.apply(ClusterFiles([path]).definition)
        path.write_text(manager.cluster()["toml"], encoding="utf-8")
        found = manager.diff(ClusterFiles([path]).definition)
    assert not found["changed"], found


def read_rate(data: bytes, folder: Path) -> object:
    return FixedWindow(data.decode("utf-8", "replace"))


def history_changes(history: bytes) -> list[bytes]:
    """The lines of a history as Redis keeps them: without their versions."""
    lines = [json.loads(line) for line in history.splitlines()[1:]]
    return [json.dumps({k: v for k, v in line.items() if k != "version"}).encode() for line in lines]


def parsers() -> dict[str, Parser]:
    """Name -> parser; the examples that need work are made here."""
    with tempfile.TemporaryDirectory() as folder:
        history = example_history(Path(folder))
        backup = example_backup(Path(folder))
    return {
        "inventory": Parser(file("i.toml", load_inventory), (INVENTORY,)),
        "document": Parser(
            lambda data, folder: document.from_json(data.decode("utf-8", "replace"), "the Variable x"),
            (example_document(), ORIGINAL_DOCUMENT),
        ),
        "redis_state": Parser(read_redis, (example_redis(),)),
        "changes": Parser(read_changes, (b"\n".join(history_changes(history)),)),
        "history": Parser(file("h.jsonl", parse_history), (history,)),
        "settings": Parser(
            read_environment,
            (
                b"GPU_MANAGER_CACHE_TTL_S=1\nGPU_MANAGER_LOCK_TIMEOUT_S=4\nGPU_MANAGER_INSTANCE=a",
                b'GPU_MANAGER_HISTORY_LENGTH=9\n\nstore = "memory://"\ncache_ttl_s = 1.5\n',
            ),
        ),
        "url": Parser(
            read_url,
            (
                b"redis://u:p@h:6379/0?namespace=a",
                b"redis+sentinel://:p@a:1,b:2/svc/0?ssl=true",
                b"unix:///run/x.sock?db=1",
                b"https://u:p@host:80/x",
            ),
        ),
        "tokens": Parser(
            file("tokens.json", lambda path: TokenFile(path).read()),
            (b'[{"token_id": "a", "name": "n", "role": "user", "digest": "00", "created_at": 1.0}]',),
        ),
        "backup": Parser(file("e.json", read_backup_again), (backup,)),
        "teams": Parser(file("t.toml", read_teams), (TEAMS,)),
        "cluster": Parser(
            file("c.toml", read_cluster), (CLUSTER, b'[cluster.prices]\n"a\\n\\u001bb" = -1\n')
        ),
        "rate": Parser(read_rate, (b"10/second", b"5 per minute")),
        **{f"body_{model.__name__}": Parser(read_body(model), (example,)) for model, example in BODIES},
    }
