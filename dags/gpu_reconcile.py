"""Ends the jobs and leases of Airflow tasks that are over; switch it on in every installation."""

from resource_manager.airflow import reconcile_dag

reconcile_dag()
