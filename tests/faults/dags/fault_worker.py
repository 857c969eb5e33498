"""One worker of the fault matrix as a task; the run's configuration is its assignment."""

from datetime import timedelta

from airflow.sdk import DAG, get_current_context, task

with DAG("fault_worker", schedule=None, catchup=False, max_active_runs=1000, max_active_tasks=1000):

    @task(retries=1000, retry_delay=timedelta(0))
    def work() -> None:
        from tests.faults.airflow_tasks import work_as_task

        context = get_current_context()
        work_as_task(context["dag_run"].conf, context["ti"].try_number)

    work()
