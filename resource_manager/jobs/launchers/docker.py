"""Launcher of jobs as containers of a Docker engine, local or remote."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.errors import how_to_install
from resource_manager.jobs.launchers.base import (
    TAIL_BYTES,
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    Output,
    check_connection,
    check_image,
    check_no_other_lease,
    is_key,
    lease_of_key,
)
from resource_manager.jobs.launchers.devices import device_files, device_names, job_environment
from resource_manager.jobs.launchers.docker_engine import TIMEOUT_S, shared_engine

LOCAL_ENGINE = "unix:///var/run/docker.sock"
LOCAL_ADDRESSES = ("127.0.0.1", "::1", "localhost")
SILENT_S = 60.0
"""Time without the end of a container after which the engine is asked for ends anew."""

STARTER_TIMEOUT_S = 5.0
TAIL_LINES = 100
PREEMPT_FILE = "GPU_PREEMPT_FILE"
OWN_DIRECTORY = "/var/lib/gpu-manager/job"
"""The job's own directory: a volume that stays for the next lease of the id, until a job has succeeded."""

KILL_AT_LABEL = "gpu-manager.kill-at"
"""Label of the volumes that say until when, in seconds since the epoch, a preempted job has its grace."""

ENDED_LABEL = "gpu-manager.ended"
"""Label of the volumes that are tombstones of jobs."""
ENDED_S = 86400.0

LOG_CHUNK_BYTES = 4 * 1024 * 1024
"""Most bytes of a log read at once; large, since the engine searches every position from the start."""


class DockerLauncher:
    """Launcher that runs one container per job, named by the job's key.

    The place's address is the engine's: `unix://`, `tcp://`, `ssh://`, or a host reached by ssh; if empty, or
    this machine's loopback address, `DOCKER_HOST` or this machine's socket. The connection is for the
    registry of the images.
    """

    def __init__(self, place: JobPlace) -> None:
        conn_id = place.conn_id or None
        check_connection(conn_id, "docker")
        self._place = place
        is_here = place.address in ("", *LOCAL_ADDRESSES)
        self.engine = os.environ.get("DOCKER_HOST", LOCAL_ENGINE) if is_here else place.address
        if "://" not in self.engine:
            self.engine = f"ssh://{self.engine}"
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
            raise LauncherUnreachableError(
                f"the Docker engine {self.engine} does not answer: {error}"
            ) from error
        self._api = self._engine.api

    def prepare(self, job: Job) -> JobPlace:
        """Pull a missing image; the port is tested only if the engine is this machine's."""
        check_image("docker", job)
        job_environment(job)
        failed = f"job {job.key} cannot be started"
        engine = self._verified(job.key)
        with self._reporting(failed, LauncherError):
            self._prune(engine)
            self._refuse_ended(job.key)
            try:
                self._api.inspect_image(job.image)
            except self._docker.errors.ImageNotFound:
                self._pull(job.image)
            listed = self._api.containers(filters={"label": "gpu-manager.lease"})
        names = [name.lstrip("/") for each in listed for name in each["Names"]]
        try:
            check_no_other_lease(job.key, names, self.engine)
        except LauncherError:  # the engine's list may still have one that has just ended
            running = (name for name in names if self._status(name).state is JobState.RUNNING)
            check_no_other_lease(job.key, running, self.engine)
        if job.port and self.engine.startswith("unix://"):
            with closing(socket.socket()) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", job.port))
                except OSError as error:
                    raise LauncherError(
                        f"{failed} on {self.engine}: port {job.port} cannot be bound: {error.strerror}"
                    ) from error
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
        with self._reporting(f"job {key} cannot be seen"):
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
                self._pull(job.image)
                container = self._create(job)
            if container is not None:
                return container
            is_late = time.monotonic() > deadline
            with suppress(self._docker.errors.NotFound):  # it is still being created, or was just removed
                found = self._api.inspect_container(job.key)
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
                self._api.put_archive(container, "/", _archive(job.files))
            self._api.start(container)
        except self._docker.errors.NotFound:
            try:
                self._api.inspect_container(container)
            except self._docker.errors.NotFound:
                return False
            raise  # what was not found is another thing, such as its network
        return True

    def _refuse_ended(self, key: str, container: str = "") -> None:
        """Raise `AlreadyEndedError` if the job was stopped; remove the container that a late start made."""
        try:
            self._api.inspect_volume(_tombstone(key))
        except self._docker.errors.NotFound:
            return
        if container:
            self._remove(container)
        if self._status(key).state is JobState.RUNNING:
            raise LauncherUnreachableError(f"job {key} is being ended and still runs on {self.engine}")
        raise AlreadyEndedError(f"job {key} has ended already; it is not started again")

    def _bury(self, key: str, engine: Mapping[str, Any]) -> None:
        """Make the job's tombstone, a volume, and remove those that are older than a day."""
        self._prune(engine)
        self._api.create_volume(_tombstone(key), labels={ENDED_LABEL: key})

    def _prune(self, engine: Mapping[str, Any]) -> None:
        now = datetime.fromisoformat(engine["SystemTime"]).timestamp()
        listed = self._api.volumes(filters={"label": ENDED_LABEL})["Volumes"] or ()
        for volume in listed:
            if datetime.fromisoformat(volume["CreatedAt"]).timestamp() < now - ENDED_S:
                with suppress(self._docker.errors.NotFound):  # another process prunes, too
                    self._api.remove_volume(volume["Name"])

    def _remove(self, container: str) -> None:
        """Remove a container that was not started; one that was started meanwhile stays."""
        with suppress(self._docker.errors.NotFound), self._in_use():
            self._api.remove_container(container, v=True)

    def _create(self, job: Job) -> str | None:
        """Create the container and return its id; None if this lease already has one."""
        environment = job_environment(job, renumbered=job.vendor != "amd")
        if job.vendor == "ascend":
            environment["ASCEND_VISIBLE_DEVICES"] = ",".join(map(str, job.gpu_ids))
        environment.update({variable: f"/{_path(variable)}" for variable in (*job.files, PREEMPT_FILE)})
        environment |= {"GPU_JOB_DIR": OWN_DIRECTORY, "GPU_CHECKPOINT_FILE": f"{OWN_DIRECTORY}/checkpoint"}
        options = {**self._host_options(job), **job.container}
        if isinstance(binds := options.get("binds", []), list):
            options["binds"] = [*binds, f"{_volume(job.key)}:{OWN_DIRECTORY}:rw"]
        try:
            made: dict[str, str] = self._api.create_container(
                job.image,
                list(job.command) or None,
                name=job.key,
                environment=environment,
                labels={f"gpu-manager.{name}": value for name, value in job.labels.items()},
                host_config=self._api.create_host_config(**options),
            )
        except self._docker.errors.APIError as error:
            if error.status_code == 409:
                return None
            raise
        return made["Id"]

    def _host_options(self, job: Job) -> dict[str, Any]:
        """Return the host options; all GPUs in one device request, since the engine uses only the first."""
        options: dict[str, Any] = {"init": True}
        if job.cpus:
            options["nano_cpus"] = int(min(job.cpus, self._engine.about["NCPU"]) * 1e9)
        if requests := self.device_requests(job):
            options["device_requests"] = requests
        elif files := device_files(job.vendor, job.gpu_ids):
            options["devices"] = [f"{path}:{path}:rwm" for path in files]
        return options

    def device_requests(self, job: Job) -> list[Any]:
        """Return the request for NVIDIA's GPUs, by CDI names where the engine, as it said, knows them.

        It says so since Docker 28.3; before, those of an engine without a runtime of NVIDIA's are taken for
        known. Containers with CDI names keep their GPUs when systemd reads its units again.
        """
        if not job.gpu_ids or job.vendor not in ("nvidia", ""):
            return []
        names, engine = device_names(job.vendor, job.gpu_ids, job.gpu_uuids), self._engine.about
        devices = [f"nvidia.com/gpu={name}" for name in names]
        known = {
            device["ID"] for device in engine.get("DiscoveredDevices") or [] if device["Source"] == "cdi"
        }
        if known.issuperset(devices) or (
            engine.get("CDISpecDirs") and "nvidia" not in engine.get("Runtimes", {})
        ):
            return [self._docker.types.DeviceRequest(driver="cdi", device_ids=devices)]
        return [self._docker.types.DeviceRequest(device_ids=names, capabilities=[["gpu"]])]

    def _pull(self, image: str) -> None:
        name, _, tag = image.partition("@") if "@" in image else _split_tag(image)
        try:
            for line in self._api.pull(name, tag or "latest", stream=True, decode=True):
                if "error" in line:
                    raise LauncherError(f"image {image!r} is not on {self.engine} and {line['error']}")
        except self._docker.errors.APIError as error:
            raise LauncherError(
                f"image {image!r} is not on {self.engine} and cannot be pulled: {error.explanation}"
            ) from error

    def status(self, key: str) -> JobStatus:
        self._check_place(key)
        found = self._status(key)
        if found.state is JobState.ABSENT:
            self._verified(key)
        return found

    def _status(self, key: str) -> JobStatus:
        try:
            with self._reporting(f"job {key} cannot be seen"):
                state = self._api.inspect_container(key)["State"]
        except self._docker.errors.NotFound:
            return JobStatus(JobState.ABSENT)
        if state["Status"] == "created" and not state["Error"]:
            return JobStatus(JobState.ABSENT)
        if state["Status"] in ("created", "exited", "dead"):
            ended_at = _nanoseconds(state["FinishedAt"]) / 1e9
            return JobStatus(JobState.FINISHED, state["ExitCode"], ended_at if ended_at > 0 else None)
        return JobStatus(JobState.RUNNING)

    def running(self) -> list[str]:
        with self._reporting(f"the jobs of {self.engine} cannot be seen"):
            listed = self._api.containers()
        names = (name.lstrip("/") for each in listed for name in each["Names"])
        return [name for name in names if is_key(name)]

    def logs(self, key: str, offset: int = 0) -> Output:
        """Return whole lines, except for the last; of one longer than `LOG_CHUNK_BYTES` only the beginning.

        `offset` is a time in nanoseconds: the engine stores the time of every line, not its position.
        """
        status = self.status(key)  # read before the log, so that that of a job that has ended is complete
        is_over = status.state is not JobState.RUNNING
        whole, line = bytearray(), bytearray()
        following = latest = offset
        is_all = True
        try:
            with self._reporting(f"the log of job {key} cannot be read"):
                for at, part in self._log_parts(key, offset):
                    line += part
                    latest = max(latest, at)
                    if part.endswith(b"\n"):
                        whole += line
                        line.clear()
                        following = latest
                    if len(whole) + len(line) >= LOG_CHUNK_BYTES:
                        is_all = False
                        break
        except self._docker.errors.NotFound:
            return Output("", offset, status)
        if not whole and (is_over or len(line) >= LOG_CHUNK_BYTES):
            whole, line, following = line, bytearray(), latest
        return Output(whole.decode("utf-8", "replace"), following, status, is_all and not (line and is_over))

    def last_output_at(self, key: str) -> int:
        """Return when the job last logged something, in nanoseconds since the epoch; 0 if it never did."""
        with suppress(self._docker.errors.NotFound), self._reporting(f"the log of job {key} cannot be read"):
            return max((at for at, _ in self._log_parts(key, 0, tail="1")), default=0)
        return 0

    def ends(self) -> Iterator[str]:
        """Yield an empty text once it is connected, then names of containers that end.

        It is over when none has ended for `SILENT_S`: a connection may be cut without a sign.
        """
        import requests

        url = f"{self._api.base_url}/v{self._api.api_version}/events"
        wanted = {"filters": json.dumps({"type": ["container"], "event": ["die"]})}
        with (
            self._reporting("the ends of jobs cannot be seen"),
            self._streamed(url, wanted, SILENT_S) as response,
        ):
            yield ""
            try:
                for line in response.iter_lines():
                    yield json.loads(line)["Actor"]["Attributes"]["name"]
            except requests.ConnectionError:  # so a read says that its time is over
                return
            raise OSError("its events came to an end")

    def _log_parts(self, key: str, offset: int, tail: str = "all") -> Iterator[tuple[int, bytes]]:
        """Yield time and text of each record logged after `offset`: a line, or parts of 16 KiB with one time.

        The SDK's `logs` is not used, since it holds the whole log in memory or waits for its end.
        """
        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{key}/logs"
        since = f"{offset // 10**9}.{offset % 10**9:09}"
        wanted = {"stdout": 1, "stderr": 1, "timestamps": 1, "since": since, "tail": tail}
        with self._streamed(url, wanted, TIMEOUT_S) as response:
            data = b""
            for piece in response.iter_content(16 * 1024):
                data += piece
                while len(data) >= 8 and len(data) >= (end := 8 + int.from_bytes(data[4:8], "big")):
                    stamp, _, text = data[8:end].partition(b" ")
                    data = data[end:]
                    at = _nanoseconds(stamp.decode())
                    if at > offset:
                        yield at, text

    @contextmanager
    def _streamed(self, url: str, wanted: Mapping[str, Any], silent_s: float) -> Iterator[Any]:
        """Yield the response to a GET, to be read as it comes; `silent_s` is the longest time without any."""
        import requests

        with self._api.get(url, params=wanted, timeout=(TIMEOUT_S, silent_s), stream=True) as response:
            try:
                response.raise_for_status()
            except requests.HTTPError as error:
                self._docker.errors.create_api_error_from_http_exception(error)
            yield response

    def tail(self, key: str) -> str:
        self._check_place(key)
        try:
            with self._reporting(f"the log of job {key} cannot be read"):
                text: bytes = self._api.logs(key, tail=TAIL_LINES)
        except self._docker.errors.NotFound:
            self._verified(key)
            return ""
        return text[-TAIL_BYTES:].decode("utf-8", "replace")

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        self._check_place(key)
        try:
            with self._reporting(f"job {key} could not be ended"):
                self._api.stop(key, timeout=math.ceil(grace_s))
        except self._docker.errors.NotFound:
            self._verified(key)

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        self._check_place(key)
        failed = f"job {key} could not be told that it is preempted"
        deadline = time.monotonic() + wait_s
        while True:
            # Another process may end and remove the job meanwhile, which the next status says.
            with suppress(self._docker.errors.NotFound), self._reporting(failed):
                found = self._status(key)
                kill_at = self._kill_at(key) if found.state is not JobState.ABSENT else None
                if found.state is JobState.ABSENT:
                    self._verified(key)
                if found.state is not JobState.RUNNING:
                    return replace(found, preempted=kill_at is not None)
                if kill_at is None:
                    now = time.time()
                    self._api.create_volume(_told_volume(key), labels={KILL_AT_LABEL: str(now + grace_s)})
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
            self._api.kill(key, signal_name)

    def _write_grace(self, key: str, grace_s: float) -> None:
        """Write the file that tells a job its grace: empty on a full disk, none if it put a folder there."""
        for text in (f"{grace_s:g}\n", ""):
            with suppress(self._docker.errors.APIError):
                self._api.put_archive(key, "/", _archive({PREEMPT_FILE: text}))
                return

    def _kill_at(self, key: str) -> float | None:
        """Return when the grace is over that the job was given, None if the job was not told."""
        try:
            return float(self._api.inspect_volume(_told_volume(key))["Labels"][KILL_AT_LABEL])
        except self._docker.errors.NotFound:
            return None

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        engine = self._verified(key)
        failed = f"job {key} could not be stopped"
        ran = self._status(key).state is JobState.RUNNING
        with self._reporting(failed):
            self._bury(key, engine)
        with suppress(self._docker.errors.NotFound), self._reporting(failed):
            self._api.stop(key, timeout=math.ceil(grace_s))
            has_succeeded = self._status(key).exit_code == 0
            try:
                self._api.remove_container(key, force=True, v=True)
            except self._docker.errors.APIError as error:
                if error.status_code != 409:
                    raise
                self._api.wait(key, timeout=TIMEOUT_S, condition="removed")  # another process removes it
            with suppress(self._docker.errors.NotFound):
                self._api.remove_volume(_told_volume(key))
            if has_succeeded:  # nothing has to go on from there, unless a later lease of the id does
                with self._in_use():
                    self._api.remove_volume(_volume(key), force=True)
        return ran

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
        self, what: str, refused: type[LauncherError] = LauncherUnreachableError
    ) -> Iterator[None]:
        """Turn errors into the launcher's; `refused` if the engine answers with an error."""
        import requests

        try:
            yield
        except self._docker.errors.NotFound:
            raise
        except self._docker.errors.APIError as error:
            raise refused(f"{what} on {self.engine}: {error.explanation}") from error
        except (requests.RequestException, OSError) as error:
            raise LauncherUnreachableError(f"{what}: {self.engine} does not answer: {error}") from error


def _tombstone(key: str) -> str:
    """Return the name of the volume that says for a day that the job was stopped."""
    return f"{key}-ended"


def _told_volume(key: str) -> str:
    """Return the name of the volume that says that the job was told of its preemption."""
    return f"{key}-told"


def _volume(key: str) -> str:
    """Return the name of the volume that all leases of the same id and rank share."""
    return f"{lease_of_key(key)}-kept"


def _path(variable: str) -> str:
    """Return the path in a container, without its first slash, of the file that a variable names."""
    return f"var/lib/gpu-manager/{variable.lower()}"


def _archive(files: Mapping[str, str]) -> bytes:
    """Return a tar archive of the job's files, with the folders above them."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for variable, text in files.items():
            entry = tarfile.TarInfo(_path(variable))
            entry.size, entry.mode, entry.mtime = len(data := text.encode()), 0o644, time.time()
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _split_tag(image: str) -> tuple[str, str, str]:
    """Split an image into name, colon and tag; a colon before the last slash begins a port, not a tag."""
    name, separator, tag = image.rpartition(":")
    return (image, "", "") if not separator or "/" in tag else (name, separator, tag)


def _nanoseconds(stamp: str) -> int:
    """Return an RFC 3339 time of the engine, with up to nine decimals, in nanoseconds since the epoch."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    whole = int(datetime.fromisoformat(seconds).replace(tzinfo=UTC).timestamp())
    return whole * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)
