"""System test of the example: a run of the usual size, which asks nobody."""

from resource_manager.airflow.example_dags.example_gpu_approval import dag
from tests.system.gpu_resource_manager.run import get_test_run

test_run = get_test_run(dag, gpus=1)
