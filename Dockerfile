# One image for Airflow's services and for the manager's own.
FROM apache/airflow:3.3.2-python3.11

WORKDIR /opt/gpu-resource-manager
COPY --chown=airflow:root pyproject.toml README.md LICENSE ./
COPY --chown=airflow:root resource_manager resource_manager
COPY --chown=airflow:root simulator simulator
# celery 5.7 dropped a name that the Celery provider imports. Airflow's version is repeated so that pip
# keeps it.
RUN pip install --no-cache-dir "apache-airflow==3.3.2" "apache-airflow-providers-celery>=3.26" "celery<5.7" \
    "psycopg2-binary>=2.9" "asyncpg>=0.29" "scikit-learn>=1.5" ".[airflow,api,redis,sql]"

WORKDIR /opt/airflow
COPY --chown=airflow:root dags dags
COPY --chown=airflow:root plugins plugins
