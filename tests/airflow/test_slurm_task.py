"""What a task on Slurm may ask for: Slurm's own terms, and a refusal by name of the rest."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager.airflow import GPUTrainingOperator
from resource_manager.airflow.slurm.task import UNUSED, _asked
from resource_manager.airflow.version_compat import AirflowFailException
from resource_manager.manager.demand import Demand

SENT = {"gpus", "cpus", "resources", "gpu_types", "nodes", "team", "owner", "expected_runtime"} | {
    "preempt_grace",
    "labels",
}
OF_A_LEASE = {"lease_id", "ttl", "quarantine"}
"""Of the lease that a job on Slurm does not have; they change nothing of what it gets."""

GIVEN: dict[str, Any] = {
    "gpu_memory": "40GB",
    "max_runtime": timedelta(hours=1),
    "types": "best",
    "priority": 3,
    "link": "require",
    "gpu_milli": 500,
}


def test_each_field_of_a_demand_is_sent_to_slurm_or_refused() -> None:
    assert Demand.model_fields.keys() == SENT | OF_A_LEASE | set(UNUSED)


@pytest.mark.parametrize(("name", "value"), GIVEN.items())
def test_what_slurm_cannot_be_asked_is_refused_by_its_name(name: str, value: object) -> None:
    operator = GPUTrainingOperator(task_id="train", launcher="slurm", command="true", gpus=1, **{name: value})
    with pytest.raises(AirflowFailException, match=f"^{name} has no meaning on Slurm: leave it out"):
        _asked(operator, {}, SimpleNamespace())  # type: ignore[arg-type]
