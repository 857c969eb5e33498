"""Files from outside: bombs, slow patterns, loaders that run code, names that are paths."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import stat
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.cluster_file.reading import load_inventory
from resource_manager.storage.archive import extend
from resource_manager.storage.history_file import collect, write_file
from simulator.cli import main
from simulator.errors import InputError
from simulator.io.files import write_text
from simulator.io.rows import read_json
from simulator.oasis.instance_file import read_instance
from simulator.replay.history import read_history
from simulator.replay.workload import read_workload
from simulator.serverless.config import ClusterConfig
from simulator.serverless.dax import read_dax
from simulator.serverless.wfcommons import read_wfcommons
from simulator.vgpu.scenario import load_scenario
from tests.conftest import ROOT

CODE = [
    path
    for folder in ("resource_manager", "simulator", "plugins", "dags", "demo")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
RUNS = {"eval", "exec", "yaml.load", "marshal.loads", "os.system", "os.popen", "pickle.load", "pickle.loads"}
ALLOWED = {
    ("simulator/serverless/env.py", "pickle.loads"),  # snapshots within one process, as documented there
    ("simulator/serverless/raw_env.py", "pickle.loads"),
    ("resource_manager/core/direct_init.py", "exec"),  # of a class's own field names, as `dataclasses` does
    ("resource_manager/jobs/launchers/standing_program.py", "exec"),  # of the programs that it is sent by ssh
}


@pytest.fixture
def quickly() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < 3


def refused(read: Callable[[Path], object], path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ResourceManagerError) as caught:
        read(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    return message


@pytest.mark.usefixtures("quickly")
def test_a_yaml_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    path = tmp_path / "c.yaml"
    refused(ClusterConfig.from_yaml, path, "\n".join([*lines, "servers: *a11"]))
    refused(ClusterConfig.from_yaml, path, "\n".join([*lines, "servers: [*a11]"]))
    refused(ClusterConfig.from_yaml, path, "servers: &a [*a]")
    refused(ClusterConfig.from_yaml, path, "servers: " + "[" * 20_000)
    refused(ClusterConfig.from_yaml, path, "servers: !!python/object/apply:os.system ['touch pwned']")
    assert not Path("pwned").exists()


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("merge", ["<<: [*a{0}, *a{0}]", "<<: *a{0}\n  b{0}: *a{0}", "k: [*a{0}, *a{0}]"])
def test_yaml_that_multiplies_itself_is_refused(merge: str, tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i}\n  {merge.format(i - 1)}" for i in range(1, 26)]
    message = refused(ClusterConfig.from_yaml, tmp_path / "c.yaml", "\n".join([*lines, "servers: []"]))
    assert "*a0 is an alias" in message


def test_an_anchor_that_nothing_refers_to_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    rest = "count: 1, hourly_rate: 1, cold_start_latency: 1, numa_nodes: {count: 1, cpu: 2, memory: 4096}"
    path.write_text(f"servers:\n- &a {{name: '*b', {rest}}}\n")
    assert ClusterConfig.from_yaml(path).servers[0].name == "*b"


NESTED = [
    (load_inventory, "i.toml", "a = " + "[" * 100_000),
    (load_inventory, "i.toml", "a = " + "{a=" * 50_000),
    (lambda path: load_scenario(str(path)), "s.toml", "a = " + "[" * 100_000),
    (read_instance, "i.json", "[" * 200_000),
    (read_json, "w.json", '{"a":' * 100_000),
    (lambda path: read_workload(path, path), "w.jsonl", "[" * 200_000),
    (lambda path: read_history(str(path)), "h.jsonl", '{"snapshot":' * 100_000),
    (read_wfcommons, "w.json", "[" * 200_000),
    (ClusterConfig.from_yaml, "c.yaml", "{a: " * 20_000),
    (read_dax, "w.dax", "<a>" * 100_000),
]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("read", "name", "content"), NESTED, ids=lambda value: str(value)[:12])
def test_deep_nesting_is_refused(
    read: Callable[[Path], object], name: str, content: str, tmp_path: Path
) -> None:
    refused(read, tmp_path / name, content)


BOMBS = [
    b" " * 70_000_000,
    b"[" + b"[]," * 16_000_000 + b"[]]",
    b"[" + b"{}," * 16_000_000 + b"{}]",
    b"[" + b"1.5," * 12_000_000 + b"1]",
    b'{"a":' * 900 + b"[" + b"1e9," * 12_000_000 + b"1]" + b"}" * 900,
]


@pytest.mark.parametrize("unpacked", BOMBS, ids=lambda unpacked: unpacked[:8].decode())
def test_a_gzip_bomb_is_not_unpacked(unpacked: bytes, tmp_path: Path) -> None:
    """Neither bytes nor values: 49 kB of packed empty lists take 1.3 GB of memory."""
    packed = gzip.compress(unpacked)
    assert len(packed) < 110_000
    (tmp_path / "w.json.gz").write_bytes(packed)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="unpacks to more than"):
            read_json(tmp_path / "w.json.gz")
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.json.gz").write_bytes(gzip.compress(b'{"a": 1}'))
    assert read_json(tmp_path / "w.json.gz") == {"a": 1}


@pytest.mark.usefixtures("quickly")
def test_xml_entities_are_not_expanded(tmp_path: Path) -> None:
    entities = '<!ENTITY a0 "aaaaaaaaaa">' + "".join(
        f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12)
    )
    path = tmp_path / "w.dax"
    refused(read_dax, path, f'<!DOCTYPE x [{entities}]><adag><job id="&a11;" runtime="1"/></adag>')
    refused(read_dax, path, '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><adag>&e;</adag>')


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("runtime", ["1" * 300_000 + "!", "1" + " " * 300_000 + "!", " " * 300_000, "1e" * 9])
def test_no_pattern_takes_unbounded_time(runtime: str, tmp_path: Path) -> None:
    refused(read_dax, tmp_path / "w.dax", f'<adag><job id="a" runtime="{runtime}"/></adag>')


@pytest.mark.usefixtures("quickly")
def test_an_inventory_above_the_limits_is_refused(tmp_path: Path) -> None:
    servers = '[[servers]]\nname = "s-{id}"\ncount = 100000\ncpus = 1\ngpus = 1024\n'
    assert "GPUs" in refused(load_inventory, tmp_path / "i.toml", servers)
    many = "".join(servers.replace("s-", f"s{i}-").replace("1024", "0") for i in range(20))
    assert "servers" in refused(load_inventory, tmp_path / "j.toml", many)


def test_no_file_is_loaded_in_a_way_that_could_run_code() -> None:
    """Find pickle, marshal, eval, exec, unsafe YAML and shells only where `ALLOWED` gives a reason."""
    found = []
    for path in CODE:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in RUNS and (name, called) not in ALLOWED:
                    found.append(f"{name}:{node.lineno} {called}")
                found += [
                    f"{name}:{node.lineno} shell"
                    for keyword in node.keywords
                    if keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
                ]
    assert found == []


def test_a_history_is_written_only_to_the_given_path(tmp_path: Path) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        manager.allocate_resources("../../../tmp/x", 2, 1)
        folder = tmp_path / "out"
        folder.mkdir()
        write_file(collect(manager), folder / "h.jsonl")
        target = tmp_path / "precious"
        target.write_text("kept")
        os.symlink(target, folder / "link.jsonl")
        write_file(collect(manager), folder / "link.jsonl")
    assert target.read_text() == "kept"  # the link is replaced, not followed
    assert sorted(os.listdir(folder)) == ["h.jsonl", "link.jsonl"]
    assert (folder / "h.jsonl").read_bytes() == (folder / "link.jsonl").read_bytes()


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022])
def test_files_are_readable_by_whom_the_umask_allows(umask: int, tmp_path: Path) -> None:
    """The history tells who ran what: the archive, an export, a report of it."""
    before = os.umask(umask)
    try:
        with GPUResourceManager.from_url("memory://") as manager:
            manager.allocate_resources("t", 2, 1)
            write_file(collect(manager), tmp_path / "export.jsonl")
            extend(tmp_path / "archive.jsonl", manager)
        write_text(tmp_path / "report.html", "x")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("export.jsonl", "archive.jsonl", "report.html"), 0o666 & ~umask)


def test_names_in_an_instance_do_not_become_file_names(tmp_path: Path) -> None:
    """`--save-instances` and every report name their files by numbers and fixed words."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    arguments = [
        "oasis",
        "--jobs",
        "4",
        "--slots",
        "6",
        "--servers",
        "2",
        "--seeds",
        "1-2",
        "--output-dir",
        str(out),
    ]
    result = CliRunner().invoke(main, [*arguments, "--save-instances", str(saved)])
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(saved)) == ["instance-1.json", "instance-2.json"]
    evil = json.loads((saved / "instance-1.json").read_text())
    for job in evil["jobs"]:
        job["id"] = "../../" + str(job.get("id", "x"))
    (tmp_path / "evil.json").write_text(json.dumps(evil))
    before = set(tmp_path.rglob("*"))
    result = CliRunner().invoke(
        main, ["oasis", "--instance", str(tmp_path / "evil.json"), "--output-dir", str(out)]
    )
    assert result.exit_code in (0, 2), result.output
    assert {path.parent for path in set(tmp_path.rglob("*")) - before} <= {out}


def test_an_error_about_a_file_is_one_printable_line(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text('job,submit_s,runtime_s,gpus\n"a\n\x1b[31mb",x,1,1\n')
    nodes = tmp_path / "n.csv"
    nodes.write_text("node,gpus\na,8\n")
    with pytest.raises(InputError) as caught:
        read_workload(nodes, path)
    assert str(caught.value).isprintable()


def test_every_test_that_the_documentation_names_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "security").glob("*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in written} == set()
