"""Jobs that run on leased GPUs: launch, monitor, stop, and match them with Airflow tasks."""
