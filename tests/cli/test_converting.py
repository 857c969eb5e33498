"""`gpu-manager convert-dags`: what becomes of the tasks of a pool, and of files that are no DAGs."""

import json
import os
import re
import stat
import warnings
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager.cli import main
from resource_manager.cli.pool_tasks import convert

HEAD = "from resource_manager.airflow import with_gpus\n"


def run(*words):
    return CliRunner().invoke(main, ["convert-dags", *map(str, words)])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('X(task_id="t", pool="gpu")', 'with_gpus(X, gpus=1)(task_id="t")'),
        ('X(pool="gpu", task_id="t")', 'with_gpus(X, gpus=1)(task_id="t")'),
        ('X(pool="gpu")', "with_gpus(X, gpus=1)()"),
        ("X(a=1, pool='gpu', pool_slots=2)", "with_gpus(X, gpus=2)(a=1)"),
        ("X(pool_slots = 2, a=1, pool = 'g' 'pu')", "with_gpus(X, gpus=2)(a=1)"),
        ("X(a=1, pool_slots=N, pool='gpu')", "with_gpus(X, gpus=N)(a=1)"),
        ("X(a=1, pool_slots=N + 1, pool='big')", "with_gpus(X, gpus=4 * (N + 1))(a=1)"),
        ("ops.X(a=1, pool='big')", "with_gpus(ops.X, gpus=4)(a=1)"),
        ("X.partial(pool='gpu', a=1).expand(b=[2])", "with_gpus(X, gpus=1).partial(a=1).expand(b=[2])"),
        (
            "X(a=1, pool='gpu') >> Y(b=[Z(pool='gpu')])",
            "with_gpus(X, gpus=1)(a=1) >> Y(b=[with_gpus(Z, gpus=1)()])",
        ),
        ("X(\n    a=1,\n    pool='gpu',\n    b=2,\n)", "with_gpus(X, gpus=1)(\n    a=1,\n    b=2,\n)"),
        ("X(\n    a=1,\n    pool='gpu'\n)", "with_gpus(X, gpus=1)(\n    a=1,\n)"),
        ("X(a=1,\n  pool='gpu',  # big\n  b=2)", "with_gpus(X, gpus=1)(a=1,\n  # big\n  b=2)"),
        ("X(a=1, pool='gpu',\n  b=2)", "with_gpus(X, gpus=1)(a=1,\n  b=2)"),
        (
            "X(\n  pool='gpu',  # one\n  pool_slots=2,  # two\n)",
            "with_gpus(X, gpus=2)(\n  # one\n  # two\n)",
        ),
        ("X(a='é', pool='gpu')  # ü", "with_gpus(X, gpus=1)(a='é')  # ü"),
        ("X(\n    pool='gpu'  # one, or two\n    , a=1)", "with_gpus(X, gpus=1)(\n    a=1)"),
        ("X(a=1, pool_slots=(n := 2), pool='gpu')", "with_gpus(X, gpus=(n := 2))(a=1)"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_task_of_the_pool_asks_for_gpus_and_keeps_every_other_byte(before, after, newline):
    before, after = (text.replace("\n", newline) for text in (f"{before}\n", f"{HEAD}{after}\n"))
    done = convert(before, {"gpu": 1, "big": 4})
    assert (done.source, done.unconverted) == (after, ())
    again = convert(after, {"gpu": 1, "big": 4})
    assert (again.source, again.converted) == (after, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@task(pool='gpu', pool_slots=2, retries=1)", "@task.gpu(gpus=2, retries=1)"),
        ("@task.python(retries=1, pool='gpu')", "@task.gpu(retries=1, gpus=1)"),
    ],
)
def test_a_function_of_the_pool_becomes_a_task_with_gpus(before, after):
    assert convert(f"{before}\ndef f(): ...\n", {"gpu": 1}).source == f"{after}\ndef f(): ...\n"


def test_the_import_comes_behind_the_others():
    source = dedent('''\
        #!/usr/bin/env python
        """Doc."""
        from __future__ import annotations
        from airflow.sdk import (
            DAG,
        )  # of Airflow

        POOL = "gpu"
        X(pool=POOL)
        import late
        ''')
    lines = convert(source, {"gpu": 1}).source.splitlines()
    assert lines[5:7] == [")  # of Airflow", HEAD.strip()]
    assert lines[9] == "with_gpus(X, gpus=1)()"
    assert convert(f"{HEAD}X(pool='gpu')\n", {"gpu": 1}).source == f"{HEAD}with_gpus(X, gpus=1)()\n"
    assert convert("'''Doc.'''\nX(pool='gpu')\n", {"gpu": 1}).source.splitlines()[1] == HEAD.strip()
    late = convert("y = 1; X(pool='gpu'); import late\n", {"gpu": 1}).source
    assert late == f"{HEAD}y = 1; with_gpus(X, gpus=1)(); import late\n"
    mixed = convert("# of two editors\r\nimport a\nX(pool='gpu')\r\n", {"gpu": 1}).source
    assert mixed.splitlines()[1:] == ["import a", HEAD.strip(), "with_gpus(X, gpus=1)()"]


def test_a_source_that_would_be_no_python_afterwards_is_left_to_its_owner():
    with pytest.raises(ValueError, match="no Python afterwards: rewrite it by hand"):
        convert("from __future__ import annotations; X(pool='gpu')\n", {"gpu": 1})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('default_args = {"retries": 1, "pool": "gpu"}', "an entry of a dictionary, such as default_args"),
        ('make_task(pool="gpu")', "make_task is not known to be an operator"),
        ("X(pool=compute())", r"pool is computed: compute\(\)"),
        ('@task.bash(pool="gpu")\ndef f(): ...', "@task.bash has no form with GPUs"),
        ('f.override(pool="gpu")()', "f.override is not known to be an operator"),
        ('def f(pool="gpu"): ...', "default of a function's parameter"),
        ('op.pool = "gpu"', "set after the task was made"),
        ('GPUTrainingOperator(pool="gpu")', "GPUTrainingOperator asks for GPUs itself"),
        ('GPUTrainingOperator(pool="gpu", **more)', "GPUTrainingOperator asks for GPUs itself"),
        ('dict(base, pool="gpu", **more)', "dict is not known to be an operator"),
        ('TriggerDagRunOperator(pool="gpu")', "with_gpus refuses TriggerDagRunOperator"),
        ('with_gpus = 1\nX(pool="gpu")', "a with_gpus of its own"),
    ],
)
def test_what_cannot_be_rewritten_is_a_line_and_stays_as_it_is(source, reason, tmp_path):
    dag = tmp_path / "dag.py"
    dag.write_text(f"{source}\n")
    done = run(tmp_path, "--pool", "gpu=1", "--write")
    assert (done.exit_code, dag.read_text()) == (1, f"{source}\n")
    line = 2 if "\nX" in source else 1
    assert done.stderr.splitlines()[0].startswith(f"{dag}:{line}: not converted: ")
    assert "0 tasks converted, 1 not" in done.stderr
    assert re.search(reason, done.stderr)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('with DAG("d", default_args={"pool_slots": 4}):\n    X(pool="gpu")', "what line 1 says"),
        ('args = dict(pool_slots=4)\nX(pool="gpu")', "what line 1 says"),
        ('X.partial(pool="gpu").expand(b=[1, 2], pool_slots=[1, 2])', "what line 1 says"),
        ('X.partial(pool="gpu").expand_kwargs([{"pool_slots": 2}])', "what line 1 says"),
        ('@task(pool="gpu", pool_slots=2)\ndef f(): ...\nf.override(pool_slots=4)()', "what line 3 says"),
        ('t = X(pool="gpu", pool_slots=2)\nt.pool_slots = 4', "what line 2 says"),
        ('t = X(pool="gpu", pool_slots=2)\nsetattr(t, "pool_slots", 4)', "what line 2 says"),
        ('def make(**more):\n    return X(pool="gpu", **more)', r"pool_slots may be in \*\*more"),
    ],
)
def test_a_task_whose_slots_may_be_others_than_its_call_says_is_left_to_its_owner(source, reason):
    done = convert(f"{source}\n", {"gpu": 1})
    assert (done.source, done.converted) == (f"{source}\n", 0)
    assert [bool(re.search(reason, each.reason)) for each in done.unconverted] == [True]


@pytest.mark.parametrize(
    "source",
    [
        'X(pool="gpu", pool_slots=2, **more)',
        'args = {"pool_slots": 4}\nX(pool="gpu", pool_slots=2)',
        'Y(pool_slots=4)\nX(pool="gpu", pool_slots=2)',
    ],
)
def test_slots_that_the_call_itself_has_are_its_gpus(source):
    done = convert(f"{source}\n", {"gpu": 1})
    assert (done.converted, done.unconverted) == (1, ())
    assert "with_gpus(X, gpus=2)" in done.source


@pytest.mark.parametrize("first", ["gpu", "default_pool"])
@pytest.mark.parametrize(
    "again",
    [
        "if LOCAL:\n    POOL = 'gpu'",
        "try:\n    from site_settings import POOL\nexcept ImportError:\n    pass",
        "for POOL in POOLS: pass",
        "POOL += '2'",
        "def make(POOL): ...",
        "def POOL(): ...",
    ],
)
def test_the_pool_by_a_name_that_is_bound_again_is_computed(first, again):
    source = f"POOL = '{first}'\n{again}\nX(pool=POOL)\n"
    done = convert(source, {"gpu": 1})
    assert done.source == source
    assert [task.reason for task in done.unconverted] == ["pool is computed: POOL"]


@pytest.mark.parametrize(
    "source", ['X(pool="other")', "X(pool=None)", "X(pools='gpu')", 'text = "pool=gpu"', "pool = 'gpu'"]
)
def test_other_pools_are_left_alone(source):
    done = convert(f"{source}\n", {"gpu": 1})
    assert (done.source, done.converted, done.unconverted) == (f"{source}\n", 0, ())


def test_only_the_difference_is_printed_until_it_is_written(tmp_path):
    dag = tmp_path / "dag.py"
    dag.write_text('X(task_id="t", pool="gpu")\n')
    dag.chmod(0o640)
    done = run(tmp_path, "--pool", "gpu=1")
    assert done.exit_code == 0
    assert '-X(task_id="t", pool="gpu")' in done.stdout
    assert '+with_gpus(X, gpus=1)(task_id="t")' in done.stdout
    assert done.stderr == "1 task would be converted (--write does it), 0 not\n"
    assert dag.read_text() == 'X(task_id="t", pool="gpu")\n'
    assert run(tmp_path, "--pool", "gpu=1", "--write").exit_code == 0
    assert dag.read_text() == f'{HEAD}with_gpus(X, gpus=1)(task_id="t")\n'
    assert stat.S_IMODE(dag.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["dag.py"]
    again = run(tmp_path, "--pool", "gpu=1", "--json")
    assert (again.exit_code, json.loads(again.stdout)["files"]) == (1, [])


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbfX(pool="gpu")  # \xc3\xa9\r\n',
        b'# -*- coding: latin-1 -*-\nX(pool="gpu")  # \xe9\n',
    ],
)
def test_a_file_keeps_its_encoding(content, tmp_path):
    dag = tmp_path / "dag.py"
    dag.write_bytes(content)
    assert run(tmp_path, "--pool", "gpu=1", "--write").exit_code == 0
    assert dag.read_bytes().endswith(content[content.index(b"  #") :])
    assert dag.read_bytes()[:3] == content[:3]


def test_hostile_files_are_a_line_each_and_nothing_outside_the_folder_is_written(tmp_path):
    folder, outside = tmp_path / "dags", tmp_path / "outside.py"
    (folder / ".hidden").mkdir(parents=True)
    outside.write_text('X(pool="gpu")\n')
    (folder / ".hidden" / "dag.py").write_text('X(pool="gpu")\n')
    (folder / "good.py").write_text('X(pool="gpu")\n')
    (folder / "huge.py").write_text('X(pool="gpu")\n' * 50_000)  # half a minute, and 700 MB of memory
    (folder / "binary.py").write_bytes(b"pool\xff\xfe\x00\x01")
    (folder / "null.py").write_bytes(b"pool = '\0'\n")
    (folder / "open.py").write_text("pool = (\n")
    (folder / "deep.py").write_text("pool = " + "-" * 50_000 + "1\n")
    (folder / "chain.py").write_text("pool = a" + ".b" * 3_000 + "\n")
    (folder / "codec.py").write_bytes(b"# -*- coding: rot13 -*-\nK(cbby='tch')  # pool\n")
    (folder / "folded.py").write_bytes(b"# -*- coding: utf-7 -*-\nX(pool='gpu', a='+AGEAYg-')\n")
    (folder / "link.py").symlink_to(outside)
    (folder / "again.py").symlink_to(folder / "good.py")
    (folder / "broken.py").symlink_to(folder / "nowhere.py")
    (folder / "root").symlink_to("/")
    os.mkfifo(folder / "pipe.py")
    done = run(folder, "--pool", "gpu=1", "--write", "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["converted"], answer["unconverted"]) == (1, 1, 11)
    problems = {file["path"].rpartition("/")[2]: file["problem"] for file in answer["files"]}
    assert problems.pop("again.py", "") == problems.pop("good.py", "") == ""
    wrong = "binary broken chain codec deep folded huge link null open pipe"
    assert set(problems) == {f"{name}.py" for name in wrong.split()}
    assert all(problems.values())
    assert outside.read_text() == (folder / ".hidden" / "dag.py").read_text() == 'X(pool="gpu")\n'
    assert (folder / "again.py").is_symlink()
    assert "with_gpus" in (folder / "good.py").read_text()


def test_a_file_that_changes_meanwhile_keeps_the_change(tmp_path, monkeypatch):
    dag = tmp_path / "dag.py"
    dag.write_text('X(pool="gpu")\n')

    def convert_late(source, pools):
        dag.write_text("saved = 'meanwhile'\n")
        return convert(source, pools)

    monkeypatch.setattr("resource_manager.cli.pool_tasks.convert", convert_late)
    done = run(tmp_path, "--pool", "gpu=1", "--write")
    assert (done.exit_code, dag.read_text()) == (1, "saved = 'meanwhile'\n")
    assert f"{dag}: not converted: it was changed meanwhile" in done.stderr
    assert os.listdir(tmp_path) == ["dag.py"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_file_that_root_converts_stays_its_owners(tmp_path):
    dag = tmp_path / "dag.py"
    dag.write_text('X(pool="gpu")\n')
    dag.chmod(0o600)
    os.chown(dag, 12345, 54321)
    assert run(dag, "--pool", "gpu=1", "--write").exit_code == 0
    found = dag.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 54321, 0o600)


def test_a_hostile_file_steers_no_terminal(tmp_path):
    (tmp_path / "a\x1b]0;x\x07.py").write_bytes(b"X(pool='gpu', a='\x1b]0;pwned\x07')\n")
    (tmp_path / "b\nc.py").write_text("pool = (\n")
    done = run(tmp_path, "--pool", "gpu=1")
    assert not {*done.stdout, *done.stderr} & {"\x1b", "\x07"}
    assert "a='\\x1b]0;pwned\\x07'" in done.stdout
    assert len(done.stderr.splitlines()) == 2


def test_json_of_hostile_files_steers_no_terminal_and_says_the_same(tmp_path):
    """A terminal takes U+009B for the begin of a command, and a name that is no text has no UTF-8."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xc2\x9b31m.py")
    with open(path, "w") as file:
        file.write('X(pool=compute("\x7f\x9b31m\u202e\u2028"))\n')
    done = run(tmp_path, "--pool", "gpu=1", "--json")
    assert not {*done.stdout} & {*"\x7f\x9b\u202e\u2028\udcff"}
    [file] = json.loads(done.stdout)["files"]
    assert file["path"] == path
    assert file["unconverted"][0]["reason"] == 'pool is computed: compute("\x7f\x9b31m\u202e\u2028")'


@pytest.mark.parametrize("pool", ["gpu", "gpu=0", "=1", "gpu=two", "gpu=-1", "gpu=99999999999", "gpu=²"])
def test_a_wrong_pool_is_refused_in_one_line(pool, tmp_path):
    done = run(tmp_path, "--pool", pool)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not POOL=GPUS" in done.stderr


def without_pools(source):
    """Return a source without what a conversion takes away and adds, without commas and blanks."""
    pool = r"""\bpool ?= ?(['"]gpu['"]|POOL)(?=[\s,)])|\bpool_slots=\d"""
    leased = rf"{HEAD}|\bwith_gpus\((?=\w+, gpus=\d\))|, gpus=\d\)(?=\()"
    return re.sub(r"[\s,]", "", re.sub(f"{pool}|{leased}", "", source))


def test_three_hundred_tasks_in_the_shapes_of_airflows_examples_are_converted_and_parsed(tmp_path):
    from tests.e2e.pool_dag import source

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Airflow's own, on import
        before = source(300)
        dag = tmp_path / "dag.py"
        dag.write_text(before)
        done = run(tmp_path, "--pool", "gpu=1", "--write", "--json")
        answer = json.loads(done.stdout)
        assert (done.exit_code, answer["converted"], answer["unconverted"]) == (1, 300, 3)
        assert run(tmp_path, "--pool", "gpu=1", "--json").stdout.count('"converted": 0') == 2
        assert without_pools(dag.read_text()) == without_pools(before)
        module: dict[str, Any] = {}
        exec(compile(dag.read_text(), "dag.py", "exec"), module)
    found = module["dag"]
    leased = [task for task in found.tasks if hasattr(task, "gpu_demand")]
    assert len(leased) == 300
    assert {task.gpu_demand["gpus"] for task in leased} == {1, 2}
    assert {task.pool for task in leased} == {"default_pool"}
    assert {task.task_id for task in found.tasks if task.pool == "gpu"} == {"later", "greet", "computed"}
