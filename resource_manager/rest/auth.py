"""Authentication of callers by token or session, authorisation by role, and the CSRF check."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import flask
from itsdangerous import BadData, URLSafeTimedSerializer

from resource_manager.rest import tokens
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.tokens import Role, Token, TokenStore

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"
CSRF_LIFE_S = 12 * 3600
TOKEN_CACHE_S = 2.0
"""Longest time that a revoked token still works; saves a read of the token store for each request."""

LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Caller of a request: the name that owns leases, and the role.

    `ambient` is true if the browser sends the credentials by itself: for cookies, and for a service open to
    everyone on this machine. A page of another site could use either, so every change then needs a CSRF
    token.
    """

    name: str
    role: Role
    ambient: bool = False

    @property
    def is_operator(self) -> bool:
        return self.role >= Role.OPERATOR


class Authenticator(Protocol):
    """Interface that identifies the caller of a request."""

    login: bool
    """True if the console has a log-in page."""

    def identify(self, request: flask.Request) -> Identity | None: ...


class OpenAuthenticator:
    """Authenticator that makes every caller an operator, for this machine or a trusted network only.

    A page of another site cannot use it: the Host must be this machine's (against DNS rebinding), and an
    Origin, if there is one, must be the service itself.
    """

    login = False

    def __init__(self, *, loopback_only: bool = True) -> None:
        self._loopback_only = loopback_only

    def identify(self, request: flask.Request) -> Identity | None:
        if self._loopback_only and (urlsplit(f"//{request.host}").hostname or "") not in LOOPBACK_NAMES:
            raise ProblemError(
                403, f"this service has no tokens and answers only to the host localhost, not {request.host}"
            )
        origin = request.headers.get("Origin")
        foreign = origin is not None and urlsplit(origin).netloc != request.host
        cross_site = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if request.method not in SAFE_METHODS and (foreign or (cross_site and origin is None)):
            raise ProblemError(403, "a page of another site may not use this service")
        return Identity("anonymous", Role.OPERATOR, ambient=origin is not None)


class TokenAuthenticator:
    """Authenticator by bearer token, or by the session cookie of a log-in with one."""

    login = True

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._tokens: dict[str, Token] = {}
        self._read_at = float("-inf")

    def identify(self, request: flask.Request) -> Identity | None:
        header = request.headers.get("Authorization")
        if header is not None:
            scheme, _, text = header.partition(" ")
            token = self.find(text.strip()) if scheme.lower() == "bearer" else None
            return None if token is None else Identity(token.name, Role.named(token.role))
        token = self.known().get(flask.session.get("token_id", ""))
        return None if token is None else Identity(token.name, Role.named(token.role), ambient=True)

    def find(self, text: str) -> Token | None:
        """Return the token with this text; read the store again before answering None."""
        return tokens.find(self.known(), text) or tokens.find(self.known(fresh=True), text)

    def known(self, *, fresh: bool = False) -> dict[str, Token]:
        if fresh or time.monotonic() - self._read_at > TOKEN_CACHE_S:
            self._tokens = self._store.read()
            self._read_at = time.monotonic()
        return self._tokens


def authorise(identity: Identity | None, role: Role | None) -> Identity | None:
    """Return the caller if their role allows it; raise 401 for an unknown caller, 403 for too low a role."""
    if role is None:
        return identity
    if identity is None:
        raise ProblemError(
            401, "a bearer token is needed: gpu-manager token create", headers={"WWW-Authenticate": "Bearer"}
        )
    if identity.role < role:
        raise ProblemError(403, f"{identity.name} has the role {identity.role}; this needs {role}")
    return identity


def csrf_token(secret: str, identity: Identity) -> str:
    """Return a token for the forms of this caller, valid for `CSRF_LIFE_S` seconds."""
    return _csrf(secret).dumps(identity.name)


def check_csrf(secret: str, identity: Identity, request: Any) -> None:
    """Raise 403 if a change with ambient credentials lacks the CSRF token of its caller."""
    if not identity.ambient or request.method in SAFE_METHODS:
        return
    text = request.headers.get(CSRF_HEADER) or (
        request.form.get(CSRF_FIELD, "") if request.mimetype == "application/x-www-form-urlencoded" else ""
    )
    try:
        name = _csrf(secret).loads(text, max_age=CSRF_LIFE_S)
    except BadData:
        name = None
    if name != identity.name:
        raise ProblemError(
            403, f"the CSRF token is missing or too old; send {CSRF_HEADER}, or reload the page"
        )


def _csrf(secret: str) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(secret, salt="gpu-manager-csrf")
