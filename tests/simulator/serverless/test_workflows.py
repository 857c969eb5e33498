"""Readers and generators of workflows, and their error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import InputError
from simulator.serverless.config import ClusterConfig
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.workflow import Workflow
from simulator.serverless.workflow_files import read_workflow, read_workflows
from simulator.serverless.workflow_shapes import SHAPES, generate_workflow

JOBS = """<adag xmlns="http://pegasus.isi.edu/schema/DAX">
<job id="ID0" runtime="{runtime}"><uses file="a" link="output" size="{size}"/></job>
<job id="ID1" runtime="1"><uses file="a" link="input" size="9"/><uses file="b" link="output" size="4"/></job>
<job id="ID2" runtime="0"><uses name="b" link="input"/></job>
<child ref="ID1"><parent ref="ID0"/></child>
{more}
</adag>"""


def dax(folder: Path, runtime: str = "2.5", size: str = "1000", more: str = "") -> Path:
    path = folder / "flow.dax"
    path.write_text(JOBS.format(runtime=runtime, size=size, more=more))
    return path


@pytest.mark.parametrize("name", ["MONTAGE.n.200.0", "CYBERSHAKE.n.200.0"])
def test_public_dax_files_agree_with_the_published_graphs(shared_data: Path, name: str) -> None:
    folder = shared_data / "serverless"
    template = read_workflow(folder / f"{name}.dax", 1000)
    graph = json.loads((folder / f"{name}.dag.json").read_text())
    edges = {(edge["parent"], edge["child"], edge["size_bytes"]) for edge in graph["edges"]}
    assert set(template.edges) == edges
    assert template.computations == tuple(round(node["runtime"] * 1000) for node in graph["nodes"])
    assert set(template.memory_reqs) == {128}
    assert set(template.parallelisms) == {1}


def test_a_folder_gives_its_workflows_but_not_their_companions(shared_data: Path) -> None:
    names = [template.name for template in read_workflows([shared_data / "serverless"])]
    assert names == ["CYBERSHAKE.n.200.0", "MONTAGE.n.200.0"]


def test_units_are_converted(tmp_path: Path) -> None:
    template = read_workflow(dax(tmp_path, "1.5 min", "2KiB"), 100)
    assert template.computations[0] == 9000
    assert template.edges == ((0, 1, 2048),)


def test_companions_give_memory_and_threads(tmp_path: Path) -> None:
    path = dax(tmp_path)
    rows = [{"id": fn_id, "value": fn_id + 2} for fn_id in range(3)]
    (tmp_path / "flow.memory.json").write_text(json.dumps({"memory_reqs": rows}))
    (tmp_path / "flow.parallelism.json").write_text(json.dumps({"parallelisms": rows}))
    template = read_workflow(path, 10)
    assert template.memory_reqs == (2, 3, 4)
    assert template.computations == (50, 30, 0)
    (tmp_path / "flow.memory.json").write_text(json.dumps({"memory_reqs": rows[1:]}))
    with pytest.raises(WorkflowError, match="expected the ids 0 to 2"):
        read_workflow(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"memory_reqs": [{"id": 0, "value": 1e400}]}', r"expected {'memory_reqs': "),
        (
            '{"memory_reqs": [{"id": 0, "value": 1}, {"id": 0, "value": 2}]}',
            "expected the ids 0 to 2 .* once",
        ),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ("{", "not JSON: "),
    ],
)
def test_a_companion_that_cannot_be_read_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = dax(tmp_path)
    (tmp_path / "flow.memory.json").write_text(text)
    with pytest.raises(InputError, match=rf"flow.memory.json:?\d*: {reason}"):
        read_workflow(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"more": '<child ref="ID0"><parent ref="ID1"/></child>'},
            r"cycle: ID\d -> ID\d -> ID\d",
        ),
        (
            {"more": '<child ref="ID9"><parent ref="ID1"/></child>'},
            r"dax:6: .*'ID9', which is not a job",
        ),
        ({"more": '<child ref="ID1"><parent/></child>'}, r"dax:6: <parent> has no 'ref'"),
        ({"more": "<child"}, "not well-formed XML"),
        ({"more": '<job id="ID1" runtime="1"/>'}, "defined twice"),
        ({"more": '<job id="ID7"/>'}, "has no 'runtime'"),
        ({"runtime": "3 weeks"}, r"dax:2: runtime '3 weeks' has an unknown unit"),
        ({"size": "3 parsec"}, r"dax:2: size '3 parsec' has an unknown unit"),
        ({"runtime": "soon"}, "'soon' is not a number"),
        ({"runtime": "-1"}, "negative"),
        ({"runtime": "1e300"}, "dax:2: runtime '1e300' is negative or above"),
    ],
)
def test_an_invalid_dax_is_refused_with_line_and_reason(
    tmp_path: Path, changed: dict[str, str], words: str
) -> None:
    with pytest.raises(WorkflowError, match=words):
        read_workflow(dax(tmp_path, **changed))


@pytest.mark.parametrize("encoding", ["GB2312", "no-such"])
def test_a_dax_in_an_encoding_that_the_parser_does_not_know_is_refused(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "flow.dax"
    path.write_text(f'<?xml version="1.0" encoding="{encoding}"?><adag/>')
    with pytest.raises(WorkflowError, match=r"flow\.dax: not readable XML: .*; save it as UTF-8"):
        read_workflow(path)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (((0, 1, 1), (1, 0, 1)), "cycle"),
        (((0, 0, 1),), "cycle: 0 -> 0"),
        (((0, 5, 1),), "names function 5"),
        (((0, 1, -1),), "-1 bytes"),
        (((0, 1, 1), (0, 1, 2)), "given twice"),
    ],
)
def test_an_invalid_template_is_refused_with_the_reason(
    edges: tuple[tuple[int, int, int], ...], words: str
) -> None:
    with pytest.raises(WorkflowError, match=words):
        WorkflowTemplate((1, 1), (1, 1), (1, 1), edges)


def instance() -> dict[str, Any]:
    task = {"name": "t", "parents": [], "children": []}
    return {
        "name": "two",
        "schemaVersion": "1.5",
        "workflow": {
            "specification": {
                "tasks": [
                    {**task, "id": "a", "children": ["b"], "outputFiles": ["f", "g"]},
                    {**task, "id": "b", "parents": ["a"], "inputFiles": ["f"]},
                ],
                "files": [{"id": "f", "sizeInBytes": 70}, {"id": "g", "sizeInBytes": 5}],
            },
            "execution": {
                "makespanInSeconds": 3,
                "tasks": [
                    {"id": "a", "runtimeInSeconds": 1.5, "coreCount": 2, "memoryInBytes": 2**20 + 1},
                    {"id": "b", "runtimeInSeconds": 2},
                ],
            },
        },
    }


def wfcommons(folder: Path, content: dict[str, Any], encoding: str = "utf-8") -> WorkflowTemplate:
    path = folder / "two.json"
    path.write_text(json.dumps(content), encoding)
    return read_workflow(path, 1000)


def test_a_wfcommons_instance_is_read(tmp_path: Path) -> None:
    template = wfcommons(tmp_path, instance())
    assert template.name == "two"
    assert template.computations == (3000, 2000)
    assert template.memory_reqs == (2, 128)
    assert template.parallelisms == (2, 1)
    assert template.edges == ((0, 1, 70),)
    assert wfcommons(tmp_path, instance(), "utf-8-sig") == template


def test_an_invalid_wfcommons_instance_is_refused_with_the_reason(tmp_path: Path) -> None:
    content = instance()
    content["schemaVersion"] = "1.3"
    with pytest.raises(WorkflowError, match=r"two\.json: .*schemaVersion"):
        wfcommons(tmp_path, content)
    content = instance()
    content["workflow"]["execution"]["tasks"][0]["runtimeInSeconds"] = 1e300
    with pytest.raises(WorkflowError, match="runtimeInSeconds: Input should be less than or equal to"):
        wfcommons(tmp_path, content)
    content = instance()
    content["workflow"]["specification"]["tasks"][0]["children"] = ["z"]
    with pytest.raises(WorkflowError, match="'z', which is not a task"):
        wfcommons(tmp_path, content)
    content = instance()
    content["workflow"]["specification"]["tasks"][0]["parents"] = ["b"]
    with pytest.raises(WorkflowError, match="cycle"):
        wfcommons(tmp_path, content)
    content = instance()
    del content["workflow"]["execution"]["tasks"][1]
    with pytest.raises(WorkflowError, match="no execution"):
        wfcommons(tmp_path, content)
    for where, what in (("execution", "execution of the task 'a'"), ("specification", "task 'a'")):
        content = instance()
        content["workflow"][where]["tasks"] *= 2
        with pytest.raises(WorkflowError, match=f"the {what} is given twice"):
            wfcommons(tmp_path, content)
    (tmp_path / "two.json").write_text("{")
    with pytest.raises(WorkflowError, match="not a WfCommons"):
        read_workflow(tmp_path / "two.json")


def test_a_workflow_reports_the_state_of_each_function() -> None:
    workflow = Workflow(0, 1.0, generate_workflow("fork_join", 2, 0))
    assert workflow.pending_functions == {0, 1, 2, 3}
    workflow[0].submit(1.0)
    assert (workflow.submitted_functions, workflow.pending_functions) == ({0}, {1, 2, 3})
    workflow[0].run(1.5)
    assert workflow.running_functions == {0}
    workflow[0].finish(2.0)
    assert workflow.ready_after(workflow[0]) == [workflow[1], workflow[2]]
    assert workflow.finished_functions == {0}
    with pytest.raises(WorkflowError, match="function 1 of workflow 0 is pending, not submitted"):
        workflow[1].run(2.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_generated_workflows_are_equal_for_equal_seeds_only(shape: str, size: int) -> None:
    template = generate_workflow(shape, size, seed=1)
    assert template == generate_workflow(shape, size, seed=1)
    assert template != generate_workflow(shape, size, seed=2)
    assert len(template) >= size


def test_shapes_have_the_expected_edges() -> None:
    assert generate_workflow("chain", 3, 0).successors == ((1,), (2,), ())
    assert generate_workflow("fork_join", 2, 0).successors == ((1, 2), (3,), (3,), ())
    # 3 projections, 2 fits, concat, model, 3 backgrounds, table, add, shrink, picture
    assert generate_workflow("montage", 3, 0).successors == (
        (3, 7), (3, 4, 8), (4, 9), (5,), (5,), (6,), (7, 8, 9), (10,), (10,), (10,), (11,), (12,), (13,), (),
    )  # fmt: skip
    assert generate_workflow("cybershake", 2, 0).successors == (
        (2,),
        (3,),
        (4, 6),
        (5, 6),
        (7,),
        (7,),
        (),
        (),
    )


def test_an_unknown_shape_or_size_is_an_error() -> None:
    with pytest.raises(InputError, match="known are montage"):
        generate_workflow("ring", 3, 0)
    for size in (0, 10**8):
        with pytest.raises(InputError, match=f"from 1 to 100,000, got {size}"):
            generate_workflow("chain", size, 0)


SERVER = """
- name: a
  count: {count}
  hourly_rate: 0.1
  cold_start_latency: {cold_start_s}
  numa_nodes: {{count: 1, cpu: 2, memory: {memory}}}
"""


def server(count: int, memory: int, cold_start_s: float = 0.5) -> str:
    return SERVER.format(count=count, memory=memory, cold_start_s=cold_start_s)


def test_the_public_cluster_is_the_default_cluster(shared_data: Path) -> None:
    config = ClusterConfig.from_yaml(shared_data / "serverless" / "cluster_config.yaml")
    assert config == ClusterConfig.c5()
    assert config.numa_node_count == 71


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servers: []", "no NUMA nodes"),
        ("servers: 3", "servers: Input should be a valid list, got 3"),
        ("servers:" + server(count=0, memory=8), "no NUMA nodes"),
        ("servers:" + server(count=10**8, memory=8), "100,000,000 NUMA nodes; no more than 1,000,000"),
        ("servers:" + server(count=1, memory=8, cold_start_s=1e308), r"servers\[0\]\.cold_start_latency: "),
        ("servers:" + server(count=1, memory=0), r"servers\[0\]\.numa_nodes\.memory"),
        (
            "servers:" + server(count=1, memory=8) + server(count=1, memory=8).strip(),
            "given twice",
        ),
        ("speed: 3\nservers: []", "speed"),
        ("servers: [", "line 1|not YAML"),
        ("- 1", "expected a mapping"),
        ("network_bandwidth: 1", "servers: Field required"),
    ],
)
def test_an_invalid_cluster_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        ClusterConfig.from_yaml(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1])
def test_a_template_refuses_amounts_that_are_negative_or_not_finite(wrong: Any) -> None:
    for amounts in (((wrong,), (1,), (1,)), ((1,), (wrong,), (1,)), ((1,), (1,), (wrong,))):
        with pytest.raises(WorkflowError, match=rf"of function 0 is {wrong}, not a number from"):
            WorkflowTemplate(*amounts)
    with pytest.raises(WorkflowError, match=f"edge 0 -> 1 carries {wrong} bytes"):
        WorkflowTemplate((1, 1), (1, 1), (1, 1), ((0, 1, wrong),))
