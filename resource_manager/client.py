"""The manager's methods over HTTP: what a `GPUResourceManager` does, asked of a service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from resource_manager.errors import (
    NO_ROOM,
    InvalidRequestError,
    LeaseNotFoundError,
    ResourceManagerError,
    UnknownNodeError,
)
from resource_manager.redaction import redact

TIMEOUT_S = 70.0
"""Longer than a manager waits for its lock."""

PAGE = 1000


class ServiceError(ResourceManagerError):
    """The service refused; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServiceUnavailableError(ServiceError):
    """The service cannot be reached, cannot reach its store, or has no room; `kind` is the problem's type."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        super().__init__(status, message)
        self.kind = kind


class ServiceClient:
    """Calls the service at `url`; `None`, `False` and errors as the manager's own methods have them."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = redact(url).rstrip("/")
        try:
            self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequestError(
                f"not a service's address: {redact(url)!r}: {error}", field="url"
            ) from error

    def allocate_resources(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Any,
    ) -> dict[str, Any] | None:
        """A lease, or None if nothing fits."""
        demand = self._demand(task_id, required_gpus, required_cpus, prefer_server_id, options)
        try:
            return self._post("/api/allocate", demand)
        except ServiceUnavailableError as error:
            if error.kind == NO_ROOM:
                return None
            raise

    def submit(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """A lease (`state` RUNNING) or a place in the queue (WAITING)."""
        return self._post(
            "/api/submit", self._demand(task_id, required_gpus, required_cpus, prefer_server_id, options)
        )

    def allocate_batch(self, requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """One entry for each request, None where nothing fitted."""
        results: list[dict[str, Any] | None] = self._post(
            "/api/allocate/batch", {"requests": [dict(request) for request in requests]}
        )["results"]
        return results

    def release_resources(self, task_id: str, *, fencing_token: int | None = None, outcome: str = "") -> bool:
        """Whether there was such a lease to end."""
        body = {"task_id": task_id, "fencing_token": fencing_token, "outcome": outcome}
        return self._found("/api/release", body)

    def renew(self, task_id: str, *, fencing_token: int | None = None) -> dict[str, Any]:
        """The lease with its new end; raises `LeaseNotFoundError`."""
        return self._post("/api/renew", {"task_id": task_id, "fencing_token": fencing_token})

    def cancel(self, task_id: str) -> bool:
        """Whether the task was waiting."""
        return self._found("/api/cancel", {"task_id": task_id})

    def drain(self, server: int | str, *, reason: str = "", failed: bool = False) -> dict[str, Any]:
        body = {"reason": reason, "failed": failed}
        return self._post(f"/api/servers/{self._server_id(server)}/drain", body)

    def restore(self, server: int | str) -> dict[str, Any]:
        return self._post(f"/api/servers/{self._server_id(server)}/restore", {})

    def reset_resources(self) -> bool:
        return bool(self._post("/api/reset", {"confirm": True})["success"])

    def get_resource_summary(self) -> dict[str, Any]:
        return self._get("/api/status")

    def status_of(self, task_id: str) -> dict[str, Any] | None:
        try:
            return self._get("/api/task", {"task_id": task_id})
        except LeaseNotFoundError:
            return None

    def leases(self) -> list[dict[str, Any]]:
        return list(self._pages("/api/leases"))

    def queue(self) -> list[dict[str, Any]]:
        """As the manager's, with `estimated_start`."""
        return list(self._pages("/api/queue"))

    def history(self, after: int = 0, limit: int = PAGE) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._get("/api/history", {"after": after, "limit": limit})["items"]
        return items

    def explain(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """As the manager's, with `estimated_start`; the service needs no task id to explain."""
        query = self._demand(None, required_gpus, required_cpus, prefer_server_id, options)
        return self._get("/api/explain", query)

    def close(self) -> None:
        self._http.close()

    def _demand(
        self,
        task_id: str | None,
        required_gpus: int,
        required_cpus: int,
        prefer_server: int | str | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        demand = {
            "task_id": task_id,
            "required_gpus": required_gpus,
            "required_cpus": required_cpus,
            "prefer_server_id": None if prefer_server is None else self._server_id(prefer_server),
            **options,
        }
        return {key: value for key, value in demand.items() if value is not None}

    def _server_id(self, server: int | str) -> int:
        if isinstance(server, int):
            return server
        servers = self.get_resource_summary()["servers"]
        for row in servers:
            if row["server_name"] == server:
                return int(row["server_id"])
        raise UnknownNodeError(server, len(servers))

    def _found(self, path: str, body: dict[str, Any]) -> bool:
        try:
            self._post(path, body)
        except LeaseNotFoundError:
            return False
        return True

    def _pages(self, path: str) -> Iterator[dict[str, Any]]:
        after: int | None = 0
        while after is not None:
            page = self._get(path, {"after": after, "limit": PAGE})
            yield from page["items"]
            after = page["next"]

    def _get(self, path: str, query: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call("GET", path, params=query)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, json={key: value for key, value in body.items() if value is not None})

    def _call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **content)
        except httpx.UnsupportedProtocol as error:
            raise InvalidRequestError(f"not a service's address: {self.url!r}", field="url") from error
        except httpx.HTTPError as error:
            raise ServiceUnavailableError(503, f"no answer from {self.url}: {error}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServiceUnavailableError(
                response.status_code,
                f"{self.url} is not a GPU manager: {method} {path} gave {response.status_code}",
            )
        if response.is_success:
            return answer
        raise _error(response.status_code, str(answer.get("detail") or answer), str(answer.get("type", "")))


def _error(status: int, detail: str, kind: str) -> ResourceManagerError:
    if status == 404:
        error = LeaseNotFoundError("")
        error.args = (detail,)
        return error
    if status in (400, 413, 415, 422):
        return InvalidRequestError(detail)
    if status >= 500:
        return ServiceUnavailableError(status, detail, kind)
    return ServiceError(status, detail)
