"""Datasets and plans read back as written; errors name file, line and reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simulator.edge.dataset_files import read_dataset, write_dataset
from simulator.edge.plan import Add, Commands, Match, read_plan, write_plan
from simulator.errors import InputError


def test_a_dataset_written_reads_back(tables: Path, tmp_path: Path) -> None:
    dataset = read_dataset(tables)
    write_dataset(dataset, tmp_path / "again" / "tiny")
    again = read_dataset(tmp_path / "again" / "tiny")
    assert again.jobs == dataset.jobs
    assert again.tasks == dataset.tasks
    assert again.devices == dataset.devices
    assert again.categories == dataset.categories
    for name in ("cpus", "memory_mib", "ue_rate", "ue_bs"):
        assert np.array_equal(getattr(again, name), getattr(dataset, name))


def test_a_plan_written_reads_back(tables: Path, tmp_path: Path) -> None:
    dataset = read_dataset(tables)
    plan = {
        3: Commands([1], [Add(2, 1, dataset.devices[4])], [Match(2, 0)]),
        1: Commands(adds=[]),
    }
    plan[1].adds.append(Add(1, 0, dataset.devices[0]))
    write_plan(plan, tmp_path / "plan")
    assert read_plan(tmp_path / "plan", dataset) == plan


@pytest.mark.parametrize(
    ("table", "old", "new", "line", "reason"),
    [
        ("bs_table", None, None, None, "cannot be read: No such file"),
        ("job_table", "ArriveTime", "Arrival", 1, "the column ArriveTime is missing"),
        ("job_table", "0,10", "0,soon", 2, "ArriveTime is 'soon', not a whole number"),
        ("job_table", "0,10", "0,-1", 2, "ArriveTime is -1, below 0"),
        ("job_table", "1,12", "0,12", 3, "JobId 0 is given twice"),
        ("job_table", "1,12", "1", 3, "1 values for 2 columns"),
        ("job_table", "1,12", "1,12\n2,20", None, "JobId 2 has no task"),
        ("task_table", "[[0, 30]]", "[[9, 30]]", 3, "task 1 has an unknown parent, 9"),
        ("task_table", "[[0, 30]]", "[[4, 30]]", 3, "the parent 4 of task 1 belongs to another job"),
        ("task_table", "[[0, 30]]", "[[0, 30], [0, 30]]", 3, "ParentTasks names a task twice"),
        ("task_table", "[[0, 30]]", "[[0, 31]]", 2, "task 0 lists child 1 with size 30; task 1 does not"),
        ("task_table", "[[0, 30]]", "[[0, thirty]]", 3, "not a list of [task id, size]"),
        ("task_table", '0,0,0,[],"[[1, 30]', '0,0,0,"[[3, 1]]","[[1, 30]', 2, "lists parent 3 with size 1"),
        ("task_table", "4,1,1,[],[],7", '4,1,1,"[[4, 1]]","[[4, 1]]",7', 6, "a cycle of parents"),
        ("task_table", "4,1,1,[],[],7", "4,1,9,[],[],7", 6, "CategoryId 9 is not in category_table.csv"),
        ("task_table", "4,1,1,[],[],7", "4,1,1,[],[],0", 6, "ComputeDuration is 0, not within 1 to 1000000"),
        ("job_table", "1,12", "1,1000001", 3, "ArriveTime is 1000001, above 1000000"),
        ("host_table", "1,0,4,4,2", "1,7,4,4,2", 3, "CloudId 7 is not in cloud_table.csv"),
        ("host_table", "1,0,4,4,2", "1,0,4,4,0", 3, "ComputeFactor must be above 0"),
        ("bs_metric", "1,600,6,6\n", "", None, "BSId 1 has no row for Time 600"),
        ("ue_table", "20,100", "20,1200", 2, "online from 20 to 1200 is not within 0 to 1199"),
        ("ue_metric", "0,50,10,1,4,4\n", "", None, "UEId 0 is online at 50 but has no row for it"),
        ("ue_metric", "0,50,10,1,4,4\n", "3,50,10,1,4,4\n", 32, "UEId 3 is not in ue_table.csv"),
        ("ue_metric", "0,51,10,1,4,4\n", "0,50,2,1,4,4\n", 33, "Time 50 of UEId 0 is given twice"),
        ("category_table", "0,2,2,3", "0,0,2,3", 2, "RequestCPU must be above 0"),
        ("category_table", "0,2,2,3", "0,2,2,1000001", 2, "PrepareDuration is 1000001, above 1000000"),
        ("task_table", "[[0, 30]]", f"[[0, {2**31}]]", 3, "[task id, size] with sizes up to 2147483647"),
        ("task_table", "[[0, 30]]", "[" * 9999, 3, "not a list of [task id, size]"),
    ],
)
def test_an_invalid_table_is_refused_with_file_line_and_reason(
    tables: Path, table: str, old: str | None, new: str | None, line: int | None, reason: str
) -> None:
    path = tables / f"{table}.csv"
    if old is None or new is None:
        path.unlink()
    else:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        read_dataset(tables)
    assert caught.value.path == path
    assert caught.value.line == line
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("file", "row", "reason"),
    [
        ("executor", "1,Add,0,0,Cloud,9", "device Cloud 9 is not in dataset tiny"),
        ("executor", "1,Add,0,9,Cloud,0", "CategoryId 9 is not in dataset tiny"),
        ("executor", "1,Move,0,0,Cloud,0", "Action is 'Move', neither Add nor Delete"),
        ("executor", "1.5,Add,0,0,Cloud,0", "Time is '1.5', not a whole number"),
        ("task", "9000000,0,0", "Time is 9000000, above 1,000,000"),
        ("task", "1,0,99", "TaskId 99 is not in dataset tiny: is this plan for another one?"),
    ],
)
def test_a_plan_for_another_dataset_is_refused(tables: Path, file: str, row: str, reason: str) -> None:
    plan = tables.parent / "plan"
    dataset = read_dataset(tables)
    write_plan({}, plan)
    with (plan / f"{file}.csv").open("a") as text:
        text.write(row + "\n")
    with pytest.raises(InputError) as caught:
        read_plan(plan, dataset)
    assert (caught.value.path, caught.value.line) == (plan / f"{file}.csv", 2)
    assert reason in caught.value.reason


def test_a_task_that_would_run_for_ages_on_the_slowest_device_is_refused(tables: Path) -> None:
    slow = tables / "ue_table.csv"
    slow.write_text(slow.read_text().replace("0,5,20", "0,2000000,20"))
    with pytest.raises(InputError, match=r"task_table.csv:4: ComputeDuration 6 x the largest .* 2000000, is"):
        read_dataset(tables)


def test_a_folder_has_the_same_name_from_within(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tables)
    assert read_dataset(Path(".")).name == read_dataset(tables).name == "tiny"
