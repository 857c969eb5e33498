"""Launcher of jobs as containers of a Docker engine, local or remote."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.errors import how_to_install
from resource_manager.jobs.directories.starting import check_port
from resource_manager.jobs.launchers import docker_container, docker_stream, docker_volumes
from resource_manager.jobs.launchers.base import (
    TAIL_BYTES,
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    NoAnswerError,
    Output,
    check_connection,
    check_image,
    check_no_other_lease,
    is_key,
)
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.launchers.docker_engine import TIMEOUT_S, shared_engine, url_of

STARTER_TIMEOUT_S = 5.0
TAIL_LINES = 100


class DockerLauncher:
    """Launcher that runs one container per job, named by the job's key.

    The place's address is the engine's: `unix://`, `tcp://`, `ssh://`, or a host reached by ssh; if empty, or
    this machine's loopback address, `DOCKER_HOST` or this machine's socket. Its connection is the registry's.
    """

    def __init__(self, place: JobPlace) -> None:
        conn_id = place.conn_id or None
        check_connection(conn_id, "docker")
        self._place = place
        self.engine = url_of(place.address)
        try:
            import docker

            self._docker = docker
            self._engine = shared_engine(self.engine, conn_id)
        except ImportError as error:
            raise LauncherError(
                f"the docker launcher needs Airflow's Docker provider: {how_to_install('docker')}"
            ) from error
        except Exception as error:
            if "connection" in str(error).lower() and "isn't defined" in str(error):
                raise LauncherError(str(error)) from error
            raise NoAnswerError(f"the Docker engine {self.engine} does not answer: {error}") from error

    def prepare(self, job: Job) -> JobPlace:
        """Pull a missing image; the port is tested only if the engine is this machine's."""
        check_image("docker", job)
        job_environment(job)
        engine, failed = self._verified(job.key), f"job {job.key} cannot be started"
        with self._reporting(failed, LauncherError):
            docker_volumes.prune_tombstones(self._engine.api, engine)
            self._refuse_ended(job.key)
            try:
                self._engine.api.inspect_image(job.image)
            except self._docker.errors.ImageNotFound:
                docker_stream.pull(self._engine.api, self.engine, job.image)
            listed = self._engine.api.containers(filters={"label": "gpu-manager.lease"})
        names = [name.lstrip("/") for each in listed for name in each["Names"]]
        try:
            check_no_other_lease(job.key, names, self.engine)
        except LauncherError:  # the engine's list may still have one that has just ended
            running = (name for name in names if self._status(name).state is JobState.RUNNING)
            check_no_other_lease(job.key, running, self.engine)
        if job.port and self.engine.startswith("unix://"):
            try:
                check_port(job.port)
            except OSError as error:
                raise LauncherError(f"{failed} on {self.engine}: {error}") from error
        self._place = replace(self._place, machine=engine["ID"])
        return self._place

    def _check_place(self, key: str) -> None:
        """Raise `LauncherUnreachableError` unless the engine was that of the job's place when it was asked.

        If another one may answer at its address by now, it has no such job: see `_verified`.
        """
        if self._place.machine != self._engine.about["ID"]:
            self._verified(key)

    def _verified(self, key: str) -> Mapping[str, Any]:
        """Return what the engine says of itself now; raises unless it is that of the job's place."""
        with self._reporting(f"job {key} cannot be seen", silent=NoAnswerError):
            engine = self._engine.current_info()
        if self._place.machine not in ("", engine["ID"]):
            raise LauncherUnreachableError(
                f"job {key} is in the Docker engine {self._place.machine}, but {self.engine} is the engine "
                f"{engine['ID']} on {engine['Name']}: ask from where that address leads to the job's engine"
            )
        return engine

    def start(self, job: Job) -> bool:
        check_image("docker", job)
        failed = f"job {job.key} could not be started"
        self._verified(job.key)
        try:
            with self._reporting(failed, LauncherError):
                self._refuse_ended(job.key)
                while (container := self._claim(job)) is not None:
                    if self._started(job, container):
                        return True
                return False
        except (LauncherUnreachableError, AlreadyEndedError):
            raise
        except (TypeError, ValueError, LauncherError, self._docker.errors.DockerException) as error:
            reason = str(error) if isinstance(error, LauncherError) else f"{failed} on {self.engine}: {error}"
            kind = LauncherError
            if self._status(job.key).state is JobState.RUNNING:  # by an earlier call
                kind = LauncherUnreachableError
            raise kind(reason) from error

    def _claim(self, job: Job) -> str | None:
        """Return the id of a container that only this call starts, None if the job was started before.

        The name of a container is given once, so one call creates it. If it does not start it within
        `STARTER_TIMEOUT_S`, as a process that died, its container is removed: by its id nobody starts it any
        more.
        """
        deadline = time.monotonic() + STARTER_TIMEOUT_S
        while True:
            try:
                container = self._create(job)
            except self._docker.errors.ImageNotFound:
                docker_stream.pull(self._engine.api, self.engine, job.image)
                container = self._create(job)
            if container is not None:
                return container
            is_late = time.monotonic() > deadline
            with suppress(self._docker.errors.NotFound):  # it is still being created, or was just removed
                found = self._engine.api.inspect_container(job.key)
                if found["State"]["Status"] != "created" or found["State"]["Error"]:
                    return None
                if is_late:
                    self._remove(found["Id"])
                    continue
            if is_late:
                raise LauncherUnreachableError(
                    f"another process creates job {job.key} on {self.engine} and does not start it"
                )
            time.sleep(0.1)

    def _started(self, job: Job, container: str) -> bool:
        """Start the container, unless the job was stopped; return False if somebody removed it meanwhile."""
        try:
            self._refuse_ended(job.key, container)
            if job.files:
                self._engine.api.put_archive(container, "/", docker_container.archive_of(job.files))
            self._engine.api.start(container)
        except self._docker.errors.NotFound:
            try:
                self._engine.api.inspect_container(container)
            except self._docker.errors.NotFound:
                return False
            raise  # what was not found is another thing, such as its network
        return True

    def _refuse_ended(self, key: str, container: str = "") -> None:
        """Raise `AlreadyEndedError` if the job was stopped; remove the container that a late start made."""
        if not docker_volumes.is_buried(self._engine.api, key):
            return
        if container:
            self._remove(container)
        if self._status(key).state is JobState.RUNNING:
            raise LauncherUnreachableError(f"job {key} is being ended and still runs on {self.engine}")
        raise AlreadyEndedError(f"job {key} has ended already; it is not started again")

    def _remove(self, container: str) -> None:
        """Remove a container that was not started; one that was started meanwhile stays."""
        with suppress(self._docker.errors.NotFound), self._in_use():
            self._engine.api.remove_container(container, v=True)

    def device_requests(self, job: Job) -> list[Any]:
        """Return what gives a container of this engine the GPUs of a job."""
        return docker_container.device_requests(job, self._engine.about)

    def _create(self, job: Job) -> str | None:
        """Create the container and return its id; None if this lease already has one."""
        api = self._engine.api
        with self._in_use():
            made: dict[str, str] = api.create_container(
                job.image,
                list(job.command) or None,
                name=job.key,
                environment=docker_container.environment_of(job),
                labels={f"gpu-manager.{name}": value for name, value in job.labels.items()},
                host_config=api.create_host_config(**docker_container.host_options(job, self._engine.about)),
            )
            return made["Id"]
        return None

    def status(self, key: str) -> JobStatus:
        self._check_place(key)
        found = self._status(key)
        if found.state is JobState.ABSENT:
            self._verified(key)
        if found.state is JobState.FINISHED:
            with self._reporting(f"job {key} cannot be seen"):
                return replace(found, preempted=docker_volumes.kill_at_of(self._engine.api, key) is not None)
        return found

    def _status(self, key: str) -> JobStatus:
        try:
            with self._reporting(f"job {key} cannot be seen"):
                state = self._engine.api.inspect_container(key)["State"]
        except self._docker.errors.NotFound:
            return JobStatus(JobState.ABSENT)
        if state["Status"] == "created" and not state["Error"]:
            return JobStatus(JobState.ABSENT)
        if state["Status"] in ("created", "exited", "dead"):
            ended_at = docker_stream.nanoseconds(state["FinishedAt"]) / 1e9
            return JobStatus(JobState.FINISHED, state["ExitCode"], ended_at if ended_at > 0 else None)
        return JobStatus(JobState.RUNNING)

    def running(self) -> list[str]:
        with self._reporting(f"the jobs of {self.engine} cannot be seen"):
            listed = self._engine.api.containers()
        names = (name.lstrip("/") for each in listed for name in each["Names"])
        return [name for name in names if is_key(name)]

    def logs(self, key: str, offset: int = 0) -> Output:
        """Return whole lines, except for the last; `offset` is a time in nanoseconds.

        The engine stores the time of every line, not its position.
        """
        status = self.status(key)  # read before the log, so that that of a job that has ended is complete
        try:
            with self._reporting(f"the log of job {key} cannot be read"):
                is_over = status.state is not JobState.RUNNING
                text, following, is_all = docker_stream.log_chunk(
                    self._engine.api, key, offset, is_over=is_over
                )
        except self._docker.errors.NotFound:
            return Output("", offset, status)
        return Output(text, following, status, is_all)

    def last_output_at(self, key: str) -> int:
        """Return when the job last logged something, in nanoseconds since the epoch; 0 if it never did."""
        with suppress(self._docker.errors.NotFound), self._reporting(f"the log of job {key} cannot be read"):
            return max(
                (at for at, _, _ in docker_stream.log_records(self._engine.api, key, 0, tail="1")), default=0
            )
        return 0

    def ends(self) -> Iterator[str]:
        """Yield what `docker_stream.ended_containers` yields."""
        with self._reporting("the ends of jobs cannot be seen"):
            yield from docker_stream.ended_containers(self._engine.api)

    def tail(self, key: str) -> str:
        self._check_place(key)
        try:
            with self._reporting(f"the log of job {key} cannot be read"):
                text: bytes = self._engine.api.logs(key, tail=TAIL_LINES)
        except self._docker.errors.NotFound:
            self._verified(key)
            return ""
        return text[-TAIL_BYTES:].decode("utf-8", "replace")

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        self._check_place(key)
        try:
            with self._reporting(f"job {key} could not be ended"):
                self._engine.api.stop(key, timeout=math.ceil(grace_s))
        except self._docker.errors.NotFound:
            self._verified(key)

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        self._check_place(key)
        failed = f"job {key} could not be told that it is preempted"
        deadline = time.monotonic() + wait_s
        own_kill_at = None
        while True:
            # Another process may end and remove the job meanwhile, which the next status says.
            with suppress(self._docker.errors.NotFound), self._reporting(failed):
                found, kill_at = self._status(key), own_kill_at
                if found.state is JobState.ABSENT:
                    self._verified(key)
                else:
                    kill_at = docker_volumes.kill_at_of(self._engine.api, key) or own_kill_at
                if found.state is not JobState.RUNNING:
                    return replace(found, preempted=kill_at is not None)
                if kill_at is None:
                    own_kill_at = time.time() + grace_s
                    if not docker_volumes.has_noted_grace(self._engine.api, key, own_kill_at):
                        deadline = math.inf  # no other call knows of it
                    self._write_grace(key, grace_s)
                    self._signal(key, f"SIG{signal_name}")
                elif time.time() >= kill_at:
                    self._signal(key, "SIGKILL")
                elif time.monotonic() >= deadline:
                    return replace(found, preempted=True)
            time.sleep(0.2)

    def _signal(self, key: str, signal_name: str) -> None:
        """Signal the job, unless it has ended."""
        with self._in_use():
            self._engine.api.kill(key, signal_name)

    def _write_grace(self, key: str, grace_s: float) -> None:
        """Write the file that tells a job its grace: empty on a full disk, none if it put a folder there."""
        for text in (f"{grace_s:g}\n", ""):
            with suppress(self._docker.errors.APIError):
                file = docker_container.archive_of({docker_container.PREEMPT_FILE: text})
                self._engine.api.put_archive(key, "/", file)
                return

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        engine, failed = self._verified(key), f"job {key} could not be stopped"
        ran = self._status(key).state is JobState.RUNNING
        with self._reporting(failed):
            docker_volumes.prune_tombstones(self._engine.api, engine)
            try:
                docker_volumes.bury(self._engine.api, key)
            except self._docker.errors.APIError:  # no room is left, which the job may have taken
                self._end(key, grace_s, failed)
                docker_volumes.bury(self._engine.api, key)
        self._end(key, grace_s, failed)
        return ran

    def _end(self, key: str, grace_s: float, failed: str) -> None:
        """End a job and remove its container, if there is one."""
        with suppress(self._docker.errors.NotFound), self._reporting(failed):
            self._engine.api.stop(key, timeout=math.ceil(grace_s))
            has_succeeded = self._status(key).exit_code == 0
            try:
                self._engine.api.remove_container(key, force=True, v=True)
            except self._docker.errors.APIError as error:
                if error.status_code != 409:
                    raise
                # Another process removes it.
                self._engine.api.wait(key, timeout=TIMEOUT_S, condition="removed")
            docker_volumes.forget_grace(self._engine.api, key)
            if has_succeeded:  # nothing has to go on from there, unless a later lease of the id does
                with self._in_use():
                    self._engine.api.remove_volume(docker_volumes.volume_of(key), force=True)

    def close(self) -> None:
        """Do nothing: others have the same connection."""

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Pass over the engine's answer that the thing is not in the state to do that with it."""
        try:
            yield
        except self._docker.errors.APIError as error:
            if error.status_code != 409:
                raise

    @contextmanager
    def _reporting(
        self,
        what: str,
        refused: type[LauncherError] = LauncherUnreachableError,
        silent: type[LauncherError] = LauncherUnreachableError,
    ) -> Iterator[None]:
        """Turn errors into the launcher's; `refused` if the engine answers with an error, else `silent`."""
        import requests

        api = self._engine.api
        try:
            yield
        except self._docker.errors.NotFound:
            raise
        except self._docker.errors.APIError as error:
            kind = silent if self._engine.refuses_version(error) else refused
            raise kind(f"{what} on {self.engine}: {error.explanation}") from error
        except (requests.RequestException, OSError) as error:
            raise silent(f"{what}: {self.engine} does not answer: {error}") from error
        except Exception as error:
            if not self._engine.lost(api, error):
                raise
            raise silent(f"{what}: {self.engine} does not answer: {error}") from error
