"""Runs jobs as containers of a Docker engine, here or elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from resource_manager.launchers.base import (
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    check_connection,
)
from resource_manager.launchers.devices import device_files, job_environment

LOCAL_ENGINE = "unix:///var/run/docker.sock"
TIMEOUT_S = 30
STARTER_PATIENCE_S = 5.0


class DockerLauncher:
    """One container for each job, named by the job's key.

    `address` is the engine's: `unix://`, `tcp://`, `ssh://`, or a host, which is reached by ssh; empty
    means `DOCKER_HOST` or this machine's socket. The connection is for the registry of the images.
    """

    def __init__(self, address: str = "", docker_conn_id: str | None = None) -> None:
        try:
            import docker
            from airflow.providers.docker.hooks.docker import DockerHook
        except ImportError as error:
            raise LauncherError(
                "the docker launcher needs Airflow's Docker provider: "
                "pip install 'gpu-resource-manager[docker]'"
            ) from error
        check_connection(docker_conn_id, "docker")
        self._docker = docker
        self._engine = address or os.environ.get("DOCKER_HOST", LOCAL_ENGINE)
        if "://" not in self._engine:
            self._engine = f"ssh://{self._engine}"
        try:
            # The hook would ask the engine for its version at once; an engine that is down raises here.
            self._api = DockerHook(docker_conn_id, self._engine, version="auto", timeout=TIMEOUT_S).api_client
        except Exception as error:
            if "connection" in str(error).lower() and "isn't defined" in str(error):
                raise LauncherError(str(error)) from error
            raise LauncherUnreachableError(
                f"the Docker engine {self._engine} does not answer: {error}"
            ) from error

    def start(self, job: Job) -> None:
        if not job.image:
            raise LauncherError("the docker launcher needs an image")
        with self._reporting(f"job {job.key} could not be started"):
            try:
                created = self._create(job)
            except self._docker.errors.ImageNotFound:
                self._pull(job.image)
                created = self._create(job)
            if created or self._is_left_unstarted(job.key):
                self._api.start(job.key)

    def _is_left_unstarted(self, key: str) -> bool:
        """Whether whoever created the container seems to have died before it started it.

        Starting one that has ended would run the job again, so the other starter gets time.
        """
        deadline = time.monotonic() + STARTER_PATIENCE_S
        while True:
            try:
                state = self._api.inspect_container(key)["State"]
                if state["Status"] != "created" or state["Error"]:
                    return False
            except self._docker.errors.NotFound:  # its name is taken, the rest is still being made
                state = None
            if time.monotonic() > deadline:
                return state is not None
            time.sleep(0.1)

    def _create(self, job: Job) -> bool:
        """Whether the container was made now; False if this lease has one already."""
        environment = job_environment(job, renumbered=job.vendor != "amd")
        if job.vendor == "ascend":
            environment["ASCEND_VISIBLE_DEVICES"] = ",".join(map(str, job.gpu_ids))
        options = {**self._host_options(job), **job.container}
        try:
            self._api.create_container(
                job.image,
                list(job.command) or None,
                name=job.key,
                environment=environment,
                labels={f"gpu-manager.{name}": value for name, value in job.labels.items()},
                host_config=self._api.create_host_config(**options),
            )
        except self._docker.errors.APIError as error:
            if error.status_code == 409:
                return False
            raise
        return True

    def _host_options(self, job: Job) -> dict[str, Any]:
        """All GPUs in one device request, since the engine takes only the first of several."""
        options: dict[str, Any] = {"init": True}
        if job.cpus:
            options["nano_cpus"] = int(min(job.cpus, self._api.info()["NCPU"]) * 1e9)
        if job.gpu_ids and job.vendor in ("nvidia", ""):
            options["device_requests"] = [
                self._docker.types.DeviceRequest(
                    device_ids=[str(gpu_id) for gpu_id in job.gpu_ids], capabilities=[["gpu"]]
                )
            ]
        elif files := device_files(job.vendor, job.gpu_ids):
            options["devices"] = [f"{path}:{path}:rwm" for path in files]
        return options

    def _pull(self, image: str) -> None:
        name, _, tag = image.partition("@") if "@" in image else _split_tag(image)
        try:
            for line in self._api.pull(name, tag or "latest", stream=True, decode=True):
                if "error" in line:
                    raise LauncherError(f"image {image!r} is not on {self._engine} and {line['error']}")
        except self._docker.errors.APIError as error:
            raise LauncherError(
                f"image {image!r} is not on {self._engine} and cannot be pulled: {error.explanation}"
            ) from error

    def status(self, key: str) -> JobStatus:
        try:
            with self._reporting(f"job {key} cannot be seen"):
                state = self._api.inspect_container(key)["State"]
        except self._docker.errors.NotFound:
            return JobStatus(JobState.ABSENT)
        if state["Status"] == "created" and not state["Error"]:
            return JobStatus(JobState.ABSENT)
        if state["Status"] in ("created", "exited", "dead"):
            return JobStatus(JobState.FINISHED, state["ExitCode"])
        return JobStatus(JobState.RUNNING)

    def logs(self, key: str, offset: int = 0) -> tuple[str, int]:
        """`offset` counts nanoseconds: the engine knows the time of every line, not its place."""
        try:
            with self._reporting(f"the log of job {key} cannot be read"):
                text = self._api.logs(key, timestamps=True, since=offset // 10**9 or None)
        except self._docker.errors.NotFound:
            return "", offset
        lines = []
        for line in text.decode("utf-8", "replace").splitlines(keepends=True):
            stamp, _, content = line.partition(" ")
            at = _nanoseconds(stamp)
            if at > offset:
                lines.append(content)
                latest = at
        return "".join(lines), latest if lines else offset

    def stop(self, key: str, grace_s: float = 10.0) -> None:
        try:
            with self._reporting(f"job {key} could not be stopped"):
                self._api.stop(key, timeout=int(grace_s))
                self._api.remove_container(key, force=True, v=True)
        except self._docker.errors.NotFound:
            return

    def close(self) -> None:
        self._api.close()

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        import requests

        try:
            yield
        except self._docker.errors.NotFound:
            raise
        except self._docker.errors.APIError as error:
            raise LauncherError(f"{what} on {self._engine}: {error.explanation}") from error
        except (requests.RequestException, OSError) as error:
            raise LauncherUnreachableError(f"{what}: {self._engine} does not answer: {error}") from error


def _split_tag(image: str) -> tuple[str, str, str]:
    """A colon after the last slash begins the tag; one before it a port."""
    name, separator, tag = image.rpartition(":")
    return (image, "", "") if not separator or "/" in tag else (name, separator, tag)


def _nanoseconds(stamp: str) -> int:
    """An RFC 3339 time with nine digits after the point, as the engine writes it, since the epoch."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    whole = int(datetime.fromisoformat(seconds).replace(tzinfo=UTC).timestamp())
    return whole * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)
