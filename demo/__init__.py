"""Demo on one machine: embedded Redis, standalone Airflow, and models that share GPUs, one on two servers."""
