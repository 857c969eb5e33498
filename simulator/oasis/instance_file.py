"""Instances as JSON, so that another program can solve the same problem; keys are the paper's symbols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from resource_manager.manager.cluster_file.servers import MAX_GPUS_OF_SERVER
from simulator.errors import InputError
from simulator.io.documents import Document, read_document
from simulator.io.files import write_json
from simulator.oasis.model import MAX_AMOUNT, MAX_COUNT, RESOURCES, Amounts, Instance, TrainingJob


class AmountsDocument(Document):
    """GPUs, CPUs, GB of memory and storage, Gb/s, to a millionth; an omitted amount is 0."""

    gpu: int = Field(0, ge=0, le=MAX_GPUS_OF_SERVER)
    cpu: float = Field(0, ge=0, le=MAX_AMOUNT)
    memory: float = Field(0, ge=0, le=MAX_AMOUNT)
    storage: float = Field(0, ge=0, le=MAX_AMOUNT)
    bandwidth: float = Field(0, ge=0, le=MAX_AMOUNT)

    def amounts(self) -> Amounts:
        return tuple(getattr(self, name) for name in RESOURCES)


class JobDocument(Document):
    """One job: arrival slot a, N chunks of M mini-batches, E epochs, tau slots a mini-batch, gradient e in
    Gb/s x slots, demand w of a worker and s of a PS, utility gamma1 / (1 + exp(gamma2 (duration - gamma3))).
    """

    job_id: str | None = Field(None, alias="id", min_length=1)
    arrival: int = Field(alias="a", ge=0, le=MAX_COUNT)
    chunks: int = Field(alias="N", ge=1, le=MAX_COUNT)
    minibatches: int = Field(alias="M", ge=1, le=MAX_AMOUNT)
    epochs: int = Field(alias="E", ge=1, le=MAX_AMOUNT)
    minibatch_slots: float = Field(alias="tau", ge=0, le=MAX_AMOUNT)
    gradient: float = Field(alias="e", ge=0, le=MAX_AMOUNT)
    worker: AmountsDocument = Field(alias="w")
    ps: AmountsDocument = Field(alias="s")
    priority: float = Field(alias="gamma1", gt=0, le=MAX_AMOUNT)
    sensitivity: float = Field(alias="gamma2", ge=0, le=MAX_AMOUNT)
    target: float = Field(alias="gamma3", ge=0, le=MAX_AMOUNT)


class InstanceDocument(Document):
    """The whole file."""

    slots: int = Field(ge=1, le=MAX_COUNT)
    worker_servers: list[AmountsDocument] = Field(min_length=1, max_length=MAX_COUNT)
    ps_servers: list[AmountsDocument] = Field(min_length=1, max_length=MAX_COUNT)
    jobs: list[JobDocument] = Field(min_length=1, max_length=MAX_COUNT)


def read_instance(path: Path) -> Instance:
    """Return the instance in the file; raise `InputError` with the file, the position and the reason."""
    document = read_document(path, InstanceDocument)
    try:
        return to_instance(document)
    except InputError as error:
        raise InputError(error.reason, path=path) from error


def to_instance(document: InstanceDocument) -> Instance:
    """Return the document as an instance; raise `InputError` for a job that cannot fit its slots."""
    jobs = []
    for index, entry in enumerate(document.jobs):
        worker, ps = entry.worker.amounts(), entry.ps.amounts()
        values = dict(entry) | {"job_id": entry.job_id or f"job-{index}", "worker": worker, "ps": ps}
        job = TrainingJob(**values)
        left = document.slots - job.arrival
        if job.shortest_duration > left:
            raise InputError(
                f"jobs[{index}] ({job.job_id}): its shortest duration of {job.shortest_duration} slots does "
                f"not fit the {max(0, left)} from its arrival in slot {job.arrival} to the end"
            )
        jobs.append(job)
    return Instance(
        document.slots,
        tuple(server.amounts() for server in document.worker_servers),
        tuple(server.amounts() for server in document.ps_servers),
        tuple(jobs),
    )


def to_document(instance: Instance) -> dict[str, Any]:
    """Return the document that `read_instance` reads back as the same instance."""

    def plain(value: Any) -> Any:
        return dict(zip(RESOURCES, value, strict=True)) if isinstance(value, tuple) else value

    keys = {name: field.alias for name, field in JobDocument.model_fields.items()}
    return {
        "slots": instance.slots,
        "worker_servers": [plain(server) for server in instance.worker_servers],
        "ps_servers": [plain(server) for server in instance.ps_servers],
        "jobs": [{key: plain(getattr(job, name)) for name, key in keys.items()} for job in instance.jobs],
    }


def write_instance(path: Path, instance: Instance) -> None:
    """Write the instance as JSON, as a whole or not at all."""
    write_json(path, to_document(instance))
