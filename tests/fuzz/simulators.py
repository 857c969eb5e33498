"""The parsers of the simulators: traces, workflows, scenarios, instances, datasets and plans."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from simulator.cli import read_seeds
from simulator.edge import random_dataset
from simulator.edge.dataset_files import COLUMNS, read_dataset, write_dataset
from simulator.edge.plan import read_plan
from simulator.oasis.instance_file import read_instance, write_instance
from simulator.oasis.random_instances import draw_instance
from simulator.replay import muri, openb
from simulator.replay.workload import read_workload
from simulator.serverless.config import ClusterConfig
from simulator.serverless.dax import read_dax
from simulator.serverless.wfcommons import read_wfcommons
from simulator.shares import instance as shares
from simulator.vgpu.scenario import load_scenario
from tests.fuzz.parser import Parser, file

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
SHARES = b"""{"gpus": {"A100": 2, "H100": 1}, "teams": {"t": {"weight": 1, "within": "fifo"}},
"throughputs": {"alone": {"k": {"A100": 1, "H100": 2}}, "pairs": [{"types": ["k", "k"], "A100": [1, 1]}]},
"jobs": [{"name": "x", "type": "k", "team": "t"}, {"name": "y", "gpus": 2, "throughput": {"A100": 0.5}}]}"""
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
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(random_dataset.generate(1, jobs=2, ues=3, tasks_per_job=4), Path(folder))
        return {path.stem: path.read_bytes() for path in Path(folder).glob("*.csv")}


def read_edge(table: str) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        for name, content in edge_tables().items():
            (folder / f"{name}.csv").write_bytes(data if name == table else content)
        return read_dataset(folder)

    return parse


@cache
def edge_dataset() -> Any:
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


def example_instance() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "i.json"
        write_instance(path, draw_instance(0, jobs=2, slots=8, servers=2))
        return path.read_bytes()


def parsers() -> dict[str, Parser]:
    """Name -> parser."""
    return {
        "cluster_yaml": Parser(file("c.yaml", ClusterConfig.from_yaml), (CLUSTER,)),
        "dax": Parser(file("w.dax", read_dax), (DAX, DAX.replace(b'"1.0"', b'"1.0" encoding="GB2312"'))),
        "wfcommons": Parser(file("w.json", read_wfcommons), (WFCOMMONS,)),
        "vgpu_scenario": Parser(file("s.toml", lambda path: load_scenario(str(path))), (VGPU,)),
        "seeds": Parser(lambda data, folder: read_seeds(data.decode("utf-8", "replace")), (b"1-20,3",)),
        "oasis_instance": Parser(file("i.json", read_instance), (example_instance(), OASIS)),
        "shares_instance": Parser(file("i.json", shares.read_instance), (SHARES,)),
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
        **{f"edge_{table}": Parser(read_edge(table), (edge_tables()[table],)) for table in COLUMNS},
    }
