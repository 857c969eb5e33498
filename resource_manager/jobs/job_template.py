"""What a request runs once it has a lease, whichever lease that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from resource_manager.errors import InvalidRequestError
from resource_manager.jobs.gang_environment import HOSTFILE, gang_environment, hostfile
from resource_manager.jobs.launchers import Job
from resource_manager.jobs.running_job import RunningJob, job_of
from resource_manager.scheduling.preemption.requeueing import restarts_of
from resource_manager.words import Words

MAX_BYTES = 64 * 1024
"""Most bytes of a template as JSON."""


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """Job of a request: command or image, environment, further options of the container, and its launcher.

    The launcher is `docker` if there is an image, else `local`, unless it is named: see `launcher_for`.
    """

    command: tuple[str, ...] = ()
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    conn_id: str | None = None
    container: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "command": tuple(value["command"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the template as plain values of JSON.

        Raises `InvalidRequestError` for what is none, by its name, and for a template above `MAX_BYTES`.
        """
        plain = asdict(self)
        for name, value in plain.items():
            try:
                plain[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                text = "{} cannot be stored with the request: {}"
                raise InvalidRequestError(text, Words.parameter(name), error) from None
        size = len(json.dumps(plain).encode())
        if size > MAX_BYTES:
            raise InvalidRequestError(
                "{command}, {image}, {env} and {container} have {:,} bytes together, at most {:,} are stored "
                "with a request: put what is long into a file on the servers",
                size,
                MAX_BYTES,
            )
        return plain

    @property
    def launcher_name(self) -> str:
        return self.launcher or ("docker" if self.image else "local")

    def launcher_for(self, allocation: Mapping[str, Any]) -> str:
        """Return the launcher of a lease: the agent, if none is named and its servers' agents run jobs."""
        is_named = bool(self.launcher or self.image)
        has_agents = all(member["job_user"] for member in allocation["members"])
        return "agent" if has_agents and not is_named else self.launcher_name

    def job(self, running: RunningJob, allocation: Mapping[str, Any]) -> Job:
        gang = gang_environment(allocation, running.rank)
        return job_of(
            allocation,
            running.key,
            self.command,
            rank=running.rank,
            environment={**self.env, **gang, "GPU_RESTART_COUNT": str(restarts_of(allocation["labels"]))},
            image=self.image,
            # Members meet at their servers' addresses, which a container has only in their network.
            container={**({"network_mode": "host"} if gang else {}), **self.container},
            files={HOSTFILE: hostfile(allocation)} if gang else {},
        )
