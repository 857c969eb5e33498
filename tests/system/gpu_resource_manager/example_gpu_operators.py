"""System test of the example: Airflow's own operators and a sensor under leases."""

from resource_manager.airflow.example_dags.example_gpu_operators import dag
from tests.system.gpu_resource_manager.run import get_test_run

test_run = get_test_run(dag)
