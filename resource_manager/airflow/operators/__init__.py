"""Airflow operators that request, use, release and reconcile leases."""
