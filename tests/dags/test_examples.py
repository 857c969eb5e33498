"""Example DAGs: Airflow loads each."""

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.dag_processing.dagbag import DagBag


REPOSITORY = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")
def test_every_example_is_a_dag():
    bag = DagBag(str(REPOSITORY / "dags"))
    assert bag.import_errors == {}
    assert set(bag.dags) == {
        "docker_step",
        "gpu_reconcile",
        "pipeline_digits",
        "simulation_sweep",
        "submit_training",
        "sweep_digits",
        "train_digits",
        "train_gang",
        "train_preemptible",
    }
    assert all(dag.description for dag in bag.dags.values())


@pytest.mark.filterwarnings("ignore")
def test_every_example_of_the_provider_is_a_dag():
    bag = DagBag(str(REPOSITORY / "resource_manager" / "airflow" / "example_dags"))
    assert bag.import_errors == {}
    assert set(bag.dags) == {
        "example_gpu_alerts",
        "example_gpu_approval",
        "example_gpu_operators",
        "example_gpu_training",
    }
    assert all(dag.description for dag in bag.dags.values())


@pytest.mark.filterwarnings("ignore")
def test_the_dag_that_gpu_manager_files_writes_is_one():
    bag = DagBag(str(REPOSITORY / "resource_manager" / "deploy" / "train_on_a_gpu.py"))
    assert bag.import_errors == {}
    assert set(bag.dags) == {"train_on_a_gpu", "gpu_reconcile"}
