"""The state in one Airflow Variable, under a Redis lock."""
