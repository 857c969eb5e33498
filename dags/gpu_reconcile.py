"""End the jobs and leases of Airflow tasks that have ended; unpause this DAG in every installation."""

from resource_manager.airflow import reconcile_dag

reconcile_dag()
