"""What the Airflow plugin registers: the service under /gpu, and its page in Airflow's navigation.

Airflow loads plugins in every process, tasks included, so nothing heavy is imported before a request comes.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf

PREFIX = "/gpu"


class LazyService:
    """An ASGI app that becomes the service at the first request."""

    def __init__(self) -> None:
        self._gate: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._gate is None:
            from resource_manager.api.airflow_app import Gate

            self._gate = Gate()
        await self._gate(scope, receive, send)


FASTAPI_APP = {"app": LazyService(), "url_prefix": PREFIX, "name": "GPU resource manager"}

PAGE = {
    "name": "GPUs",
    "href": f"{urlsplit(conf.get('api', 'base_url', fallback='') or '').path.rstrip('/')}{PREFIX}/",
    "destination": "nav",
    "url_route": "gpus",
    "category": "browse",
}
