"""Authentication of callers by token or session, authorisation by role, and the CSRF check."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import flask
from itsdangerous import BadData

from resource_manager.errors import ResourceManagerError
from resource_manager.manager.cluster_file.sign_on import LOOPBACK_NAMES
from resource_manager.rest import tokens
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.sessions import SessionStore
from resource_manager.rest.signing import serializer
from resource_manager.rest.tokens import USE_EVERY_S, Role, Token, TokenStore

logger = logging.getLogger(__name__)

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"
CSRF_LIFE_S = 12 * 3600
CSRF_SALT = "gpu-manager-csrf"
TOKEN_CACHE_S = 2.0
"""Longest time that a revoked token still works; saves a read of the token store for each request."""

MAX_LOG_INS = 32
"""Most log-ins of a person; beyond them the oldest ends."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Caller of a request: the name that owns leases, the role, and the teams they may name; none: any team.

    `ambient` is true if the browser sends the credentials by itself: for cookies, and for a service open to
    everyone on this machine. A page of another site could use either, so every change then needs a CSRF
    token. `server` is the one whose reports the caller may send, `*` for any. `run_jobs`: agents run
    jobs for them.
    """

    name: str
    role: Role
    ambient: bool = False
    teams: tuple[str, ...] = ()
    server: str = ""
    run_jobs: bool = False

    @property
    def is_operator(self) -> bool:
        return self.role >= Role.OPERATOR


def refuse_other_pages(request: flask.Request) -> None:
    """Raise 403 if a page of another origin sent the request.

    Browsers send `Sec-Fetch-Site` over HTTPS and to this machine only, `Origin` with every change.
    """
    origin = request.headers.get("Origin")
    other_origin = origin is not None and origin.partition("://")[2] != request.host
    if other_origin or request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ProblemError(
            403,
            f"a page of another site may not use this service: it is reached as {request.host} "
            "(a proxy in front must pass the Host on)",
        )


class ExpiredTokenError(ProblemError):
    """Error 401 of a token whose secret is right and whose time is over."""

    def __init__(self, token: Token) -> None:
        rotate = f"an operator makes another with gpu-manager token rotate {token.token_id}"
        super().__init__(
            401,
            f"the log-in of {token.name} has expired: gpu-manager login"
            if token.subject
            else f"token {token.token_id} of {token.name} has expired: {rotate}",
            headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
        )


class Authenticator(Protocol):
    """Interface that identifies the caller of a request."""

    login: bool
    """True if the console has a log-in page."""

    def identify(self, request: flask.Request, *, fresh: bool = True) -> Identity | None:
        """Return the caller; `fresh` allows a read of the token store for an unknown bearer token.

        A cookie, which this service signed, always allows one. Raises `ExpiredTokenError`.
        """
        ...


class OpenAuthenticator:
    """Authenticator that makes every caller an operator, for this machine or a trusted network only.

    A page of another site cannot use it: the Host must be this machine's (against DNS rebinding), and an
    Origin, if there is one, must be the service itself. Once a `known` token is a caller's it refuses
    everybody until it is started again: whoever made one expects that callers need one. That of an agent
    says nothing of callers, and its use is noted.
    """

    login = False

    def __init__(self, known: TokenAuthenticator, *, loopback_only: bool) -> None:
        self._loopback_only = loopback_only
        self._known = known
        self._is_closed = False

    def identify(self, request: flask.Request, *, fresh: bool = True) -> Identity | None:
        self._is_closed = self._is_closed or self._known.has_callers()
        if self._is_closed:
            raise ProblemError(
                401, "this service was started without tokens, and there are some now: start it again"
            )
        if self._loopback_only and (urlsplit(f"//{request.host}").hostname or "") not in LOOPBACK_NAMES:
            raise ProblemError(
                403, f"this service has no tokens and answers only to the host localhost, not {request.host}"
            )
        if request.method not in SAFE_METHODS:
            refuse_other_pages(request)
        with suppress(ExpiredTokenError):
            self._known.agent_of(_bearer(request))  # `agent install` waits for the first use of its token
        return Identity(
            "anonymous", Role.OPERATOR, ambient="Origin" in request.headers, server="*", run_jobs=True
        )


class TokenAuthenticator:
    """Authenticator by bearer token, or by the session of a log-in with one; the cookie only names it."""

    login = True

    def __init__(
        self, store: TokenStore, sessions: SessionStore, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._clock = clock
        self._tokens: dict[str, Token] = {}
        self._noted_at: dict[str, float] = {}
        self._gone: set[str] = set()
        """Tokens of sessions for which the store was read in vain: they were revoked."""
        self._read_at = float("-inf")

    def identify(self, request: flask.Request, *, fresh: bool = True) -> Identity | None:
        if "Authorization" in request.headers:
            text = _bearer(request)
            token = self.token_of(text, fresh=fresh) if text else None
            return None if token is None else _holder(token)
        token_id, session_id = _session()
        if not token_id:  # health needs no store
            return None
        token = self._read().get(token_id)
        if token is None and token_id not in self._gone:
            # Another service may have made it just now.
            token = self._read(fresh=True).get(token_id)
            if token is None:
                self._gone.add(token_id)
        if token is None or token.has_expired(self._clock()):
            return None
        if not self._sessions.is_live(token_id, session_id):
            return None
        self._note_use(token_id)
        return _holder(token, ambient=True)

    def begin_session(self, token: Token) -> None:
        """Log this browser in as the token's holder, with a new session in the place of its old one."""
        self.end_session()
        session_id = secrets.token_urlsafe(16)
        self._sessions.begin(token.token_id, session_id)
        flask.session.update(token_id=token.token_id, session_id=session_id)

    def end_session(self) -> None:
        """Log this browser out: copies of its cookie are worth nothing from now on."""
        token_id, session_id = _session()
        if token_id:
            self._sessions.end(token_id, session_id)
        flask.session.clear()

    def issue(
        self, name: str, role: Role, teams: Sequence[str], subject: str, life_s: float
    ) -> tuple[Token, str]:
        """Create a token for a person who signed on; return it and its text.

        Drops expired log-ins, and this person's oldest beyond `MAX_LOG_INS`: every call reads all tokens.
        """
        now = self._clock()
        log_ins = [token for token in self._read(fresh=True).values() if token.subject is not None]
        theirs = sorted((token for token in log_ins if token.subject == subject), key=lambda t: t.created_at)
        for token in log_ins:
            if token.has_expired(now) or token in theirs[: 1 - MAX_LOG_INS]:
                self._store.delete(token.token_id)
        text = tokens.create(
            self._store, name, role, teams=teams, expires_s=life_s, subject=subject, now=self._clock
        )
        made = tokens.find(self._read(fresh=True), text)
        assert made is not None
        return made, text

    def end_log_in(self, text: str) -> bool:
        """Revoke the token of a sign-on; return False for any other."""
        token = self.token_of(text)
        if token is None or token.subject is None:
            return False
        self._store.delete(token.token_id)
        self._read(fresh=True)
        return True

    def token_of(self, text: str, *, fresh: bool = True) -> Token | None:
        """Return the token with this text and note its use; if `fresh`, read the store before answering None.

        Raises `ExpiredTokenError`.
        """
        found = tokens.find(self._read(), text)
        if fresh and found is None:
            found = tokens.find(self._read(fresh=True), text)
        if found is not None:
            if found.has_expired(self._clock()):
                raise ExpiredTokenError(found)
            self._note_use(found.token_id)
        return found

    def _note_use(self, token_id: str) -> None:
        """Note the token's use once in a while; a call does not fail if that cannot be written."""
        now = self._clock()
        if abs(now - self._noted_at.get(token_id, float("-inf"))) < USE_EVERY_S:
            return
        self._noted_at[token_id] = now
        try:
            self._store.note_use(token_id, now)
        except (ResourceManagerError, OSError) as error:
            logger.warning("the last use of token %s is not noted: %s", token_id, error)

    def agent_of(self, text: str) -> Identity | None:
        """Return the holder of that agent token, None for any other text; a new one after `TOKEN_CACHE_S`.

        Whoever asks is counted only later: each wrong token must not read the store.
        """
        token = self.token_of(text, fresh=False)
        return _holder(token) if token is not None and token.role == str(Role.AGENT) else None

    def has_callers(self) -> bool:
        """Return whether there is a token of others than agents; a new one counts after `TOKEN_CACHE_S`."""
        return tokens.has_callers(self._read())

    def _read(self, *, fresh: bool = False) -> dict[str, Token]:
        """Return the tokens by id, at most `TOKEN_CACHE_S` old; `fresh` reads the store."""
        if fresh or abs(self._clock() - self._read_at) > TOKEN_CACHE_S:  # also if the clock was set back
            self._tokens = self._store.read()
            self._read_at = self._clock()
        return self._tokens


def _bearer(request: flask.Request) -> str:
    """Return the text of the request's bearer token, empty without one."""
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


def _holder(token: Token, *, ambient: bool = False) -> Identity:
    return Identity(
        token.name, Role.named(token.role), ambient, token.teams, token.server, bool(token.run_jobs)
    )


def _session() -> tuple[str, str]:
    """Return the token id and the session id in this browser's cookie, empty without one."""
    return str(flask.session.get("token_id", "")), str(flask.session.get("session_id", ""))


def authorise(identity: Identity | None, role: Role | None) -> Identity | None:
    """Return the caller if their role allows it; raise 401 for an unknown caller, 403 for too low a role."""
    if role is None:
        return identity
    if identity is None:
        fault, challenge = "a bearer token is needed", "Bearer"
        if "Authorization" in flask.request.headers:
            fault = "the bearer token is not one of this service, or was revoked"
            challenge = 'Bearer error="invalid_token"'
        detail = f"{fault}: gpu-manager login, or gpu-manager token create"
        raise ProblemError(401, detail, headers={"WWW-Authenticate": challenge})
    if not identity.role.includes(role) and not (role is Role.AGENT and identity.server):
        raise ProblemError(403, f"{identity.name} has the role {identity.role}; this needs {role}")
    return identity


def csrf_token(secret: str, identity: Identity | None) -> str:
    """Return a token for the forms of this caller, valid for `CSRF_LIFE_S` seconds; empty for a stranger."""
    return serializer(secret, CSRF_SALT).dumps(identity.name) if identity else ""


def check_csrf(secret: str, identity: Identity) -> None:
    """Raise 403 if a change with ambient credentials lacks the CSRF token of its caller."""
    if not identity.ambient:
        return
    request = flask.request
    text = request.headers.get(CSRF_HEADER) or (
        request.form.get(CSRF_FIELD, "") if request.mimetype == "application/x-www-form-urlencoded" else ""
    )
    try:
        name = serializer(secret, CSRF_SALT).loads(text, max_age=CSRF_LIFE_S)
    except BadData:
        name = None
    if name != identity.name:
        raise ProblemError(
            403,
            f"the CSRF token is missing, too old or another caller's: reload the page, or send {CSRF_HEADER}",
        )
