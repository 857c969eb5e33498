"""Parts that the Airflow plugin registers: the service under /gpu and its entry in Airflow's navigation.

Airflow loads plugins in every process, tasks included, so heavy imports wait for the first request.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf

logger = logging.getLogger(__name__)

PREFIX = "/gpu"

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class LazyService:
    """ASGI app that creates the service at the first request."""

    def __init__(self) -> None:
        self._gate: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._gate is None:
            from resource_manager.airflow.webapp import Gate

            self._gate = Gate()
        await self._gate(scope, receive, send)


def publish_at_start(app: Any) -> Any:
    """Publish this Airflow's instance id for its tasks and return the API server's app unchanged.

    The API server calls this once as it starts, before it answers any request. If the database is not ready
    then, a thread tries again until the id is written.
    """
    if not _published():
        threading.Thread(target=_publish_later, name="publish-instance", daemon=True).start()
    return app


def _publish_later() -> None:
    wait_s = FIRST_RETRY_S
    while True:
        time.sleep(wait_s)
        if _published():
            return
        wait_s = min(2 * wait_s, MAX_RETRY_S)


def _published() -> bool:
    """Publish the instance id; return False if it failed and should be retried."""
    from resource_manager.errors import SettingsError
    from resource_manager.jobs.airflow_instance import publish_instance

    try:
        logger.info("GPU leases of this Airflow carry the instance id %s", publish_instance())
    except Exception as error:  # must not keep Airflow from starting
        logger.error("this Airflow has no instance id, so tasks get no GPUs: %s", error)
        return isinstance(error, SettingsError)  # no later try can succeed
    return True


AT_START = {"middleware": publish_at_start, "name": "GPU resource manager"}

FASTAPI_APP = {"app": LazyService(), "url_prefix": PREFIX, "name": "GPU resource manager"}


def _page(name: str, path: str, route: str) -> dict[str, str]:
    """Return a page of the console as an entry of Airflow's navigation."""
    base = urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")
    href = f"{base}{PREFIX}{path}"
    return {"name": name, "href": href, "destination": "nav", "url_route": route, "category": "browse"}


PAGES = [_page("GPUs", "/", "gpus"), _page("GPU queue", "/queue", "gpu-queue")]
