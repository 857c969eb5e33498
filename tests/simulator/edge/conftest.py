"""Folder of tables small enough for results calculated by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

UE_METRIC = "\n".join(f"0,{at},{10 if at < 60 else 2},{0 if at < 40 else 1},4,4" for at in range(20, 101))

TABLES = {
    "cloud_table": "CloudId,Rate\n0,100\n1,50\n",
    "host_table": "HostId,CloudId,CPU,Memory,ComputeFactor\n0,0,8,8,1\n1,0,4,4,2\n2,1,4,4,1\n",
    "bs_table": "BSId,Rate,ComputeFactor\n0,20,3\n1,10,3\n",
    "bs_metric": "BSId,Time,CPU,Memory\n0,0,6,6\n1,0,6,6\n0,600,3,3\n1,600,6,6\n",
    "ue_table": "UEId,ComputeFactor,OnlineTime,OfflineTime\n0,5,20,100\n",
    "ue_metric": f"UEId,Time,Rate,BSId,CPU,Memory\n{UE_METRIC}\n",
    "category_table": "CategoryId,RequestCPU,RequestMemory,PrepareDuration\n0,2,2,3\n1,3,1,1\n",
    "job_table": "JobId,ArriveTime\n0,10\n1,12\n",
    # Job 0 is a diamond 0 -> 1, 2 -> 3; job 1 is one task.
    "task_table": (
        "TaskId,JobId,CategoryId,ParentTasks,ChildTasks,ComputeDuration\n"
        '0,0,0,[],"[[1, 30], [2, 40]]",5\n'
        '1,0,0,"[[0, 30]]","[[3, 45]]",4\n'
        '2,0,1,"[[0, 40]]","[[3, 10]]",6\n'
        '3,0,0,"[[1, 45], [2, 10]]",[],2\n'
        "4,1,1,[],[],7\n"
    ),
}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, text in TABLES.items():
        (folder / f"{name}.csv").write_text(text)
    return folder
