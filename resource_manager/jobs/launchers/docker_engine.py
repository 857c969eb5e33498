"""Docker engines as this process knows them: one client for all who ask the same one."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import docker

LOCAL_ENGINE = "unix:///var/run/docker.sock"
LOCAL_ADDRESSES = ("127.0.0.1", "::1", "localhost")
TIMEOUT_S = 30

MAX_AGE_S = 600.0
"""Age from which a client is given to nobody else: the registry's credentials may have changed."""


def url_of(address: str) -> str:
    """Return the URL of the engine at the address of a place."""
    is_here = address in ("", *LOCAL_ADDRESSES)
    engine = os.environ.get("DOCKER_HOST", LOCAL_ENGINE) if is_here else address
    return engine if "://" in engine else f"ssh://{engine}"


class Engine:
    """Client of an engine, for any number of threads; `about` is what the engine said of itself last.

    `conn_id` names the Airflow connection for the registry. Raises what Airflow's hook and the SDK raise.
    """

    def __init__(self, url: str, conn_id: str | None) -> None:
        self._url, self._conn_id = url, conn_id
        self._logging_in = threading.Lock()
        self.api = self._client()
        self.about: Mapping[str, Any] = self.api.info()
        self.opened_at = time.monotonic()

    def _client(self) -> docker.APIClient:
        from airflow.providers.docker.hooks.docker import DockerHook

        # With version="auto" the hook contacts the engine here, which raises if the engine is down.
        api = DockerHook(self._conn_id, self._url, version="auto", timeout=TIMEOUT_S).api_client
        # Not at the end of the process: a forked child must send nothing on the connections of its parent.
        weakref.finalize(self, api.close).atexit = False
        ssh = getattr(api.get_adapter(api.base_url), "ssh_client", None)
        if ssh is not None:  # without this a call waits an hour where the connection was cut in silence
            ssh.get_transport().channel_timeout = TIMEOUT_S
        return api

    def lost(self, api: docker.APIClient, error: Exception) -> bool:
        """Return whether this client's connection by ssh is lost; then another one is made for the next call.

        The SDK lets such errors through as they are, and logs in once for each client.
        """
        if not (isinstance(error, EOFError) or type(error).__module__.startswith("paramiko.")):
            return False
        if self._logging_in.acquire(blocking=False):  # one log-in is enough for all threads
            try:
                if self.api is api:
                    with suppress(Exception):  # it does not answer: the next call meets the same error
                        self.api = self._client()
            finally:
                self._logging_in.release()
        return True

    def refuses_version(self, error: docker.errors.APIError) -> bool:
        """Return whether the engine no longer speaks the version of its API that was agreed on.

        Then it was upgraded or taken back meanwhile, and another version is agreed on for the next call.
        """
        if re.search(r"client version \S+ is too (old|new)", error.explanation or "") is None:
            return False
        with suppress(Exception):  # it does not answer: the next call meets the same refusal
            self.api = self._client()
        return True

    def current_info(self) -> Mapping[str, Any]:
        """Return what the engine says of itself now."""
        from docker.errors import APIError

        try:
            self.about = self.api.info()
        except APIError as error:
            if not self.refuses_version(error):
                raise
            self.about = self.api.info()
        return self.about


_shared: dict[tuple[str, str | None], Engine] = {}

_of_parent: list[Engine] = []
"""Engines of the process that this one was forked from, kept so that nothing is sent as they are removed."""


def shared_engine(url: str, conn_id: str | None) -> Engine:
    """Return the engine, whose client all that ask for it in this process share."""
    found = _shared.get((url, conn_id))
    if found is None or time.monotonic() - found.opened_at > MAX_AGE_S:
        found = _shared[url, conn_id] = Engine(url, conn_id)
    return found


def _leave_to_parent() -> None:
    _of_parent.extend(_shared.values())
    _shared.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
