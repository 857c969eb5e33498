"""Client of HTTP that trusts the certificate authorities of today, also in a process of months."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

READ_AGAIN_S = 10.0
"""Shortest time between two readings of the authorities: one takes longer than many requests."""


class Authorities:
    """Certificate authorities that clients of this process trust, as SSL_CERT_FILE names them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = 0.0
        self._context: ssl.SSLContext | None = None

    def context(self, doubted: ssl.SSLContext | None = None) -> ssl.SSLContext:
        """Return the authorities that were read last, which `doubted` ones are no longer after a while.

        No lock: a process may be forked while another thread reads, and reading twice does no harm.
        """
        if self._context is None:
            self._context, self._read_at = httpx.create_ssl_context(), self._clock()
        elif self._context is doubted and self._clock() - self._read_at >= READ_AGAIN_S:
            with suppress(OSError):  # the file is being replaced
                self._context, self._read_at = httpx.create_ssl_context(), self._clock()
        return self._context


AUTHORITIES = Authorities()


class HttpClient(httpx.Client):
    """`httpx.Client` that reads the authorities again where it does not trust a server's certificate.

    The certificate or its authority may have been renewed, and SSL_CERT_FILE replaced, since they were read.
    """

    def __init__(self, authorities: Authorities = AUTHORITIES, **how: Any) -> None:
        self._authorities, self._how = authorities, how
        self._context = authorities.context()
        self._newer: httpx.Client | None = None
        super().__init__(verify=self._context, **how)

    def send(self, request: httpx.Request, **how: Any) -> httpx.Response:
        doubted = self._context
        try:
            return self._sent(request, **how)
        except httpx.ConnectError as error:  # so nothing of the request was sent
            if not is_caused_by(error, ssl.SSLCertVerificationError):
                raise
            context = self._authorities.context(doubted)
            if context is doubted:
                raise
            if self._context is doubted:  # no other thread was here first
                # Those before are not closed: threads may wait for answers on their connections.
                self._newer, self._context = httpx.Client(verify=context, **self._how), context
        return self._sent(request, **how)

    def close(self) -> None:
        super().close()
        if self._newer is not None:
            self._newer.close()

    def _sent(self, request: httpx.Request, **how: Any) -> httpx.Response:
        return super().send(request, **how) if self._newer is None else self._newer.send(request, **how)


def is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether the error, or one that led to it, is of that kind."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
