"""Connection to a lease service: calls that are sent again where that helps, and answers that are checked."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, TypeVar, cast
from urllib.request import getproxies, proxy_bypass
from weakref import WeakSet

import httpx

from resource_manager.errors import InvalidRequestError, redact
from resource_manager.jobs.http_client import HttpClient, is_caused_by
from resource_manager.rest.answers import Page, check, harmless
from resource_manager.rest.client_errors import ServiceBusyError, ServiceUnavailableError, error_of

logger = logging.getLogger(__name__)

_spread = random.Random()
"""Of its own, so that waiting changes no random numbers of the program."""

RETRY_S, MAX_RETRY_S = 0.1, 4.0
"""Shortest and longest pause before a call is sent again, unless the service names a longer one."""

CONNECT_S = 10.0
"""Longest time until a connection is there: where nothing answers, nothing refuses it either."""

RENEW_S = 15.0
"""Timeout of a renewal: whoever renews has to ask again in the life of the lease where one call hangs."""

BUSY_S = 30.0
"""Time for which a call that is one too many is sent again."""

WRONG_URL = "its scheme, host or port is wrong"

PAGE = 1000

T = TypeVar("T")


class Clock(Protocol):
    """Time, as the module `time` has it."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class ServiceConnection:
    """Connection to the service at `url`; raises what the manager would have.

    One that is refused is tried again for `connect_timeout_s` seconds.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float,
        connect_timeout_s: float,
        transport: httpx.BaseTransport | None = None,
        clock: Clock = time,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self.renewing = {"timeout": min(timeout_s, RENEW_S)}
        if token and not (token.isascii() and token.isprintable() and " " not in token):
            # The error of httpx would contain the token.
            raise InvalidRequestError(
                "the token has a space, a line break or another character that tokens do not have",
                field="token",
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = redact(url).rstrip("/")
        text = "not the address of a service, such as http://localhost:5000: {!r}: {}"
        try:
            base = httpx.URL(url.rstrip("/"))
            if base.scheme not in ("http", "https") or not base.host or (base.port or 0) > 65535:
                # Of a port that is too large sockets take the lowest bits: another program's.
                raise ValueError(WRONG_URL)
            text = "no way to {} by the environment (HTTP_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE): {}"
            self._open = partial(
                HttpClient,
                base_url=base,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
                transport=transport,
            )
            self.client = self._open()
        except httpx.InvalidURL as error:  # it may quote a part of the password
            raise InvalidRequestError(text, redact(url), WRONG_URL, field="url") from error
        except (ValueError, ImportError, OSError) as error:
            raise InvalidRequestError(text, redact(url), error, field="url") from error
        self._way = "" if transport is not None else _proxy_to(base)
        _all.add(self)

    def forked(self) -> None:
        """Leave the connections to the parent: on one that two share, each would read the other's answers."""
        if not self.client.is_closed:
            self.client = self._open()

    def close(self) -> None:
        self.client.close()

    def pages(
        self, kind: type[T], path: str, after: int = 0, limit: int | None = PAGE, **asked: str
    ) -> Iterator[T]:
        """Yield the items of all pages: without `limit` a service gives the queue as one, and so all demands.

        Smaller pages of these are cut by position: one that leaves between two would hide another.
        """
        following: int | None = after
        while following is not None:
            query = {"after": following, "limit": limit, **asked}
            page = self.get(Page[kind], path, query)  # type: ignore[valid-type]
            yield from page["items"]
            before, following = following, page["next"]
            if following is not None and (following <= before or not (page["items"] or asked)):
                raise ServiceUnavailableError(502, f"{self.url} gave pages of {path} that do not end")

    def get(self, kind: type[T], path: str, query: dict[str, Any] | None = None) -> T:
        return self.call(kind, "GET", path, params=_without_none(query or {}))

    def post(self, kind: type[T], path: str, body: dict[str, Any], **how: Any) -> T:
        return self.call(kind, "POST", path, json=_without_none(body), **how)

    def _answer(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Return the response; try again where the connection is refused, as while a service starts.

        So too, for `BUSY_S`, where the service refuses the call as one too many of its caller's: no sooner
        than its Retry-After says, which is logged once if it is a second or more.
        """
        began, patience_s, has_said = self._clock.monotonic(), RETRY_S, False
        while True:
            pause_s = RETRY_S
            try:
                response = self.client.request(method, path, **content)
                wait_s = response.headers.get("Retry-After", "0")
                left_s = began + BUSY_S - self._clock.monotonic()
                if response.status_code != 429 or not wait_s.isdecimal() or float(wait_s) >= left_s:
                    return response
                pause_s = float(wait_s) + patience_s * (0.5 + _spread.random())  # nosec B311  # they spread
                patience_s = min(2 * patience_s, MAX_RETRY_S)
                if float(wait_s) >= 1 and not has_said:
                    has_said = True
                    logger.warning("%s has too many calls; asking again in %.1f s", self.url, pause_s)
            except httpx.ConnectError as error:
                is_refused = is_caused_by(error, ConnectionRefusedError)  # so the request was not sent
                if not is_refused or self._clock.monotonic() >= began + self._connect_timeout_s:
                    raise
            self._clock.sleep(pause_s)

    def call(self, kind: type[T], method: str, path: str, **content: Any) -> T:
        """Return the answer, which is of that type; raises what the manager would have."""
        try:
            response = self._answer(method, path, **content)
        except httpx.HTTPError as error:
            lost = method != "GET" and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise ServiceUnavailableError(
                503,
                f"no answer from {self.url}{self._way}: {error}{_remedy(error)}"
                + (f"; whether {method} {path} was carried out is unknown" if lost else ""),
            ) from error
        except (TypeError, ValueError) as error:
            raise InvalidRequestError("cannot be sent to a service: {}", error) from error
        try:
            answer = harmless(response.json())
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) and response.status_code == 429:  # by a proxy, or before it was read
            raise ServiceBusyError(
                f"{self.url} has too many calls: it refused {method} {path}; ask again later"
            )
        # Airflow answers an unknown path so, and where it asks for a login first.
        of_airflow = isinstance(answer, dict) and answer.get("error") == "API route not found"
        is_problem = isinstance(answer, dict) and isinstance(answer.get("detail"), str)
        if of_airflow or not (isinstance(answer, dict) if response.is_success else is_problem):
            raise ServiceUnavailableError(
                502 if response.is_success else response.status_code,
                f"no answer from {self.url}{self._way}: a proxy before it gave {status} to {method} {path}"
                if (status := response.status_code) >= 500 or status == 413
                else f"{self.url} is not a GPU manager: {method} {path}{self._way} gave {status}"
                + _elsewhere(response)
                + (f"; that of an Airflow with the plugin is {self.url}/gpu" if of_airflow else ""),
            )
        if not response.is_success:
            raise error_of(response.status_code, answer, response.headers.get("Retry-After", ""))
        try:
            check(answer, kind)
        except ValueError as error:
            raise ServiceUnavailableError(
                502, f"{self.url} gave another answer to {method} {path} than a GPU manager of ours: {error}"
            ) from error
        return cast("T", answer)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


_all: WeakSet[ServiceConnection] = WeakSet()


def _in_forked_child() -> None:
    for connection in list(_all):
        connection.forked()


os.register_at_fork(after_in_child=_in_forked_child)


def _proxy_to(url: httpx.URL) -> str:
    """Return by which proxy of the environment that address is reached, for a message; empty if by none."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme, proxies.get("all"))
    return "" if proxy is None or proxy_bypass(url.host) else f" by the proxy {redact(proxy)} (see NO_PROXY)"


def _remedy(error: httpx.HTTPError) -> str:
    """Return what to do about an error of TLS; empty for others."""
    text = str(error).lower()
    if "self-signed" in text or "issuer" in text:
        return "; set SSL_CERT_FILE to the certificate of its authority"
    is_other = "ssl" not in text or "certificate" in text
    return "" if is_other else "; does it speak TLS? If not, its address begins with http://"


def _elsewhere(response: httpx.Response) -> str:
    """Return where a redirection leads, without its query; empty for another answer."""
    place = response.headers.get("Location", "") if response.is_redirect else ""
    return f" and leads to {harmless(redact(place))}" if place else ""
