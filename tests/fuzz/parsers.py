"""Every parser of data from outside: how to feed it bytes, what it may raise, and real examples."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from resource_manager import GPUResourceManager, ResourceManagerError
from resource_manager.api import schemas as bodies
from resource_manager.api.limits import FixedWindow
from resource_manager.api.problems import from_validation
from resource_manager.api.tokens import TokenFile
from resource_manager.client import ServiceClient
from resource_manager.history import collect, write_file
from resource_manager.inventory import load_inventory
from resource_manager.redaction import redact
from resource_manager.redis_client import RedisClient
from resource_manager.schemas import change_from_json
from resource_manager.settings import Settings
from resource_manager.stores import document, redis_layout
from simulator.cli import BadInput, read_seeds
from simulator.edge import generate
from simulator.edge.plan import read_plan
from simulator.edge.tables import COLUMNS, read_dataset, write_dataset
from simulator.errors import InputError
from simulator.oasis.instance_file import read_instance
from simulator.replay import muri, openb
from simulator.replay.history import read_history
from simulator.replay.history import workload_of as history_workload
from simulator.replay.workload import read_workload
from simulator.serverless.config import ClusterConfig
from simulator.serverless.dax import read_dax
from simulator.serverless.wfcommons import read_wfcommons
from simulator.vgpu.scenario import load_scenario


@dataclass(frozen=True, slots=True)
class Parser:
    """`read` gets bytes and an empty folder; it may raise `ResourceManagerError` or `BadInput`."""

    read: Callable[[bytes, Path], object]
    examples: tuple[bytes, ...]


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A parser of one file of that name."""

    def parse(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return parse


# ---- the manager ----

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
BODIES: tuple[tuple[type[BaseModel], bytes], ...] = (
    (
        bodies.AllocateBody,
        b'{"task_id": "t", "required_gpus": 1, "required_cpus": 4, "gpu_milli": 300, "labels": {"a": "b"}, '
        b'"ttl_s": 60, "resources": {"memory_mib": 5.5}, "gpu_types": ["A100"], "utility": 1, "target_s": 2}',
    ),
    (bodies.BatchBody, b'{"requests": [{"task_id": "t", "required_gpus": 2, "required_cpus": 4}]}'),
    (bodies.LeaseBody, b'{"task_id": "t", "fencing_token": 3}'),
    (bodies.DrainBody, b'{"reason": "fan", "failed": true}'),
    (bodies.ResetBody, b'{"confirm": true}'),
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
    """Leases, shares, a queue, a drained server and a history."""
    manager = GPUResourceManager.from_url("memory://")
    for number in range(4):
        manager.allocate_resources(f"t{number}", 6, 8, team="a", labels={"k": "v"}, quarantine=True)
    manager.allocate_resources("share", 1, 1, gpu_milli=300, ttl_s=50)
    manager.submit("waits", 8, 8, utility=1.0, target_s=5.0, expected_runtime_s=9.0)
    manager.renew("t1")
    manager.drain(3, reason="fan")
    manager.release_resources("t0", outcome="SUCCESS")
    manager.restore(3)
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
    """Inventory, three numbers and five hashes, as refresh.lua answers; parts end at NUL, pairs at tab."""
    parts = data.split(b"\0")
    parts += [b""] * (9 - len(parts))
    inventory = redis_layout.inventory_from_json(b"1", parts[0])
    hashes = [part.split(b"\t") if part else [] for part in parts[4:9]]
    pairs = [flat[: len(flat) // 2 * 2] for flat in hashes]
    return redis_layout.read_state(1, [*parts[1:4], *pairs], inventory)


def example_redis() -> bytes:
    cluster = manager_with_everything().store.refresh(None)
    assert cluster is not None
    snapshot = cluster.snapshot()
    hashes: dict[str, list[str]] = {}
    parts = redis_layout.parts_of(snapshot)
    for part, field, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        hashes.setdefault(part, []).extend((field, text))
    names = ("lease", "renewal", "quarantined", "waiting", "drained")
    held = ["\t".join(hashes.get(name, [])) for name in names]
    return "\0".join([redis_layout.inventory_to_json(snapshot), "9", "9", "", *held]).encode()


def read_changes(data: bytes, folder: Path) -> object:
    return [change_from_json(line) for line in data.splitlines()]


def example_history(folder: Path) -> bytes:
    write_file(collect(manager_with_everything()), folder / "h.jsonl")
    return (folder / "h.jsonl").read_bytes()


def parse_history(path: Path) -> object:
    return history_workload(read_history(str(path)), "h")


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
    return settings.price_admission()


def read_url(data: bytes, folder: Path) -> object:
    """A store's or a service's address; nothing is connected to."""
    url = data.decode("utf-8", "surrogateescape")
    redact(url)
    if url.startswith("http"):
        return ServiceClient(url).close()
    with closing(RedisClient.from_url(url)) as client:
        return client.key("meta")


def read_rate(data: bytes, folder: Path) -> object:
    return FixedWindow(data.decode("utf-8", "replace"))


# ---- the simulators ----

VGPU = b'base = "A3"\ntitle = "x"\nduration_s = 60.0\n[scheduling]\nadmission = "usage"\n'
CLUSTER = b"""network_bandwidth: 10000
servers:
  - {name: a, count: 2, hourly_rate: 0.1, cold_start_latency: 0.5,
     numa_nodes: {count: 1, cpu: 2, memory: 4096}}
"""
DAX = b"""<?xml version="1.0"?><adag xmlns="x"><job id="a" runtime="1.5">
<uses file="f" link="output" size="10"/></job>
<job id="b" runtime="2 s"><uses name="f" link="input" size="1 KB"/></job>
<child ref="b"><parent ref="a"/></child></adag>"""
WFCOMMONS = json.dumps(
    {
        "name": "w",
        "schemaVersion": "1.5",
        "workflow": {
            "specification": {
                "tasks": [
                    {"name": "a", "id": "a", "parents": [], "children": ["b"], "outputFiles": ["f"]},
                    {"name": "b", "id": "b", "parents": ["a"], "children": [], "inputFiles": ["f"]},
                ],
                "files": [{"id": "f", "sizeInBytes": 100}],
            },
            "execution": {
                "makespanInSeconds": 3,
                "executedAt": "2026-01-01",
                "tasks": [
                    {"id": "a", "runtimeInSeconds": 1.5, "coreCount": 1, "memoryInBytes": 1000},
                    {"id": "b", "runtimeInSeconds": 2},
                ],
            },
        },
    }
).encode()
OASIS = json.dumps(
    {
        "slots": 4,
        "worker_servers": [{"gpu": 4, "cpu": 8, "mem": 32, "storage": 100}],
        "ps_servers": [{"gpu": 0, "cpu": 8, "mem": 32, "storage": 100}],
        "jobs": [],
    }
).encode()
NODES = b"node,gpus,cpus,memory_mib,gpu_type,vendor\na,8,64,1000,A100,nvidia\nb,2,8,,,\n"
JOBS = (
    b"job,submit_s,runtime_s,gpus,gpu_milli,cpus,gpu_types,priority,team\n"
    b"x,0,10,2,,4,A100,1,t\ny,1.5,3,1,300,,,-2,\n"
)
JSON_JOBS = b"""[{"job": "x", "submit_s": 0, "runtime_s": 10, "gpus": 2},
{"job": "y", "submit_s": 1, "runtime_s": 2, "gpus": 1}]"""
OPENB_NODES = b"sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\nn1,96000,786432,8,G3\n"
OPENB_PODS = (
    b"name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"
    b"p0,12000,16384,1,1000,,LS\np1,6000,12288,1,460,P100|G3,BE\n"
)
MURI = b"""job_id,num_gpu,submit_time,iterations,model_name,iteration_time
1,1,0,10,resnet18,500
2,16,1e3,7,vgg16,5.5
"""


def read_replay(jobs_name: str) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        (folder / "nodes.csv").write_bytes(NODES)
        (folder / jobs_name).write_bytes(data)
        return read_workload(folder / "nodes.csv", folder / jobs_name)

    return parse


def read_replay_nodes(data: bytes, folder: Path) -> object:
    (folder / "nodes.csv").write_bytes(data)
    (folder / "jobs.csv").write_bytes(JOBS)
    return read_workload(folder / "nodes.csv", folder / "jobs.csv")


def read_openb(which: str) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        for sub in ("csv", "fixtures"):
            (folder / sub).mkdir()
        contents = {"nodes": OPENB_NODES, "pods": OPENB_PODS, which: data}
        (folder / "csv" / openb.NODE_LIST).write_bytes(contents["nodes"])
        (folder / "csv" / "openb_pod_list_x.csv").write_bytes(contents["pods"])
        if which == "fixture":
            (folder / "fixtures" / "x.json.gz").write_bytes(gzip.compress(data, 1))
        return openb.read_trace(folder, "x", 42)

    return parse


@cache
def edge_tables() -> dict[str, bytes]:
    """A small dataset of the generator's, by table."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_dataset(generate.generate(1, jobs=2, ues=3, tasks_per_job=4), Path(folder))
        return {path.stem: path.read_bytes() for path in Path(folder).glob("*.csv")}


def read_edge(table: str) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        for name, content in edge_tables().items():
            (folder / f"{name}.csv").write_bytes(data if name == table else content)
        return read_dataset(folder)

    return parse


@cache
def edge_dataset() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, content in edge_tables().items():
            (Path(folder) / f"{name}.csv").write_bytes(content)
        return read_dataset(Path(folder))


def read_edge_plan(data: bytes, folder: Path) -> object:
    executors, _, tasks = data.partition(b"\n\n")
    (folder / "executor.csv").write_bytes(executors)
    (folder / "task.csv").write_bytes(tasks)
    return read_plan(folder, edge_dataset())


EDGE_PLAN = (
    b"Time,Action,ExecutorId,CategoryId,DeviceType,DeviceId\n0,Add,1,0,Cloud,0\n9,Delete,1,,,\n\n"
    b"Time,ExecutorId,TaskId\n5,1,0\n"
)


@cache
def parsers() -> dict[str, Parser]:
    """Name -> parser; the examples that need work are made here."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        history = example_history(Path(folder))
    found = {
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
                b"GPU_MANAGER_MIN_GPUS=1\nGPU_MANAGER_TEAM_QUOTAS=a=0.5,b=0.1\nGPU_MANAGER_ADMISSION=open",
                b'GPU_MANAGER_ORDER=fifo\n\nstore = "memory://"\nprice_low = 1.5\n',
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
        "rate": Parser(read_rate, (b"10/second", b"5 per minute")),
        "cluster_yaml": Parser(file("c.yaml", ClusterConfig.from_yaml), (CLUSTER,)),
        "dax": Parser(file("w.dax", read_dax), (DAX,)),
        "wfcommons": Parser(file("w.json", read_wfcommons), (WFCOMMONS,)),
        "vgpu_scenario": Parser(file("s.toml", lambda path: load_scenario(str(path))), (VGPU,)),
        "seeds": Parser(lambda data, folder: read_seeds(data.decode("utf-8", "replace")), (b"1-20,3",)),
        "oasis_instance": Parser(file("i.json", read_instance), (example_instance(), OASIS)),
        "replay_jobs_csv": Parser(read_replay("jobs.csv"), (JOBS,)),
        "replay_jobs_json": Parser(read_replay("jobs.json"), (JSON_JOBS,)),
        "replay_jobs_lines": Parser(
            read_replay("jobs.jsonl"), (b'{"job": "x", "submit_s": 0, "runtime_s": 10, "gpus": 2}\n',)
        ),
        "replay_nodes": Parser(read_replay_nodes, (NODES,)),
        "openb_nodes": Parser(read_openb("nodes"), (OPENB_NODES,)),
        "openb_pods": Parser(read_openb("pods"), (OPENB_PODS,)),
        "openb_fixture": Parser(read_openb("fixture"), (b'{"42": {"order": [0, 1], "node_rank": [0, 1]}}',)),
        "muri": Parser(
            lambda data, folder: (
                (folder / "x.csv").write_bytes(data),
                muri.read_jobs(folder, "x"),
            ),
            (MURI,),
        ),
        "edge_plan": Parser(read_edge_plan, (EDGE_PLAN,)),
    }
    for model, example in BODIES:
        found[f"body_{model.__name__}"] = Parser(read_body(model), (example,))
    for table in COLUMNS:
        found[f"edge_{table}"] = Parser(read_edge(table), (edge_tables()[table],))
    return found


def history_changes(history: bytes) -> list[bytes]:
    """The lines of a history as Redis keeps them: without their versions."""
    lines = [json.loads(line) for line in history.splitlines()[1:]]
    return [json.dumps({k: v for k, v in line.items() if k != "version"}).encode() for line in lines]


def example_instance() -> bytes:
    import tempfile

    from simulator.oasis.instance_file import write_instance
    from simulator.oasis.workload import draw_instance

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "i.json"
        write_instance(path, draw_instance(0, jobs=2, slots=8, servers=2))
        return path.read_bytes()


def check(parser: Parser, data: bytes, folder: Path) -> None:
    """Feeds the parser; raises whatever it should not raise, and for an error of more than one line."""
    try:
        parser.read(data, folder)
    except (ResourceManagerError, BadInput) as error:
        message = str(error)
        if len(message.splitlines()) != 1:
            raise AssertionError(f"not one line: {message[:500]!r}") from error


__all__ = ["Parser", "check", "parsers"]
