"""A mail if a training fails, and one about a run that takes over an hour; Airflow 3.2 and later.

The mails go by the connection `smtp_default`.
"""

from datetime import timedelta

from airflow.providers.smtp.notifications.smtp import SmtpNotifier
from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference

from resource_manager.airflow import GPUTrainingOperator

TO = "gpu-team@example.com"

with DAG(
    "example_gpu_alerts",
    description="Mails about a training that fails or takes longer than planned.",
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    doc_md=__doc__,
    deadline=DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(hours=1),
        callback=AsyncCallback(
            SmtpNotifier,
            kwargs={
                "to": TO,
                "subject": "A training has not ended within an hour",
                "html_content": "gpu-manager explain, or the page GPUs, says why it waits.",
            },
        ),
    ),
) as dag:
    GPUTrainingOperator(
        task_id="train",
        gpus=1,
        command='echo "training on GPU $CUDA_VISIBLE_DEVICES"',
        retries=1,
        on_failure_callback=SmtpNotifier(
            to=TO, subject="{{ ti.task_id }} of {{ run_id }} failed", html_content="See {{ ti.log_url }}."
        ),
    )
