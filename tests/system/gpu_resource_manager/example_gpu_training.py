"""System test of the example: a training, and a task of Python on a GPU."""

from resource_manager.airflow.example_dags.example_gpu_training import dag
from tests.system.gpu_resource_manager.run import get_test_run

test_run = get_test_run(dag)
