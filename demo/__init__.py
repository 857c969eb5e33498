"""Demo on one machine: an embedded Redis, a standalone Airflow, and six models that share GPUs."""
