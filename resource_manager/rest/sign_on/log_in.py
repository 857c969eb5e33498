"""Log-ins by sign-on: begun at the provider, ended with a token of the service for the person."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from itsdangerous import BadData

from resource_manager.core.cluster_settings import SignOn
from resource_manager.errors import SettingsError
from resource_manager.rest.auth import TokenAuthenticator
from resource_manager.rest.limits import FixedWindow
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.sessions import SESSION_LIFE_S
from resource_manager.rest.sign_on.person import person_of
from resource_manager.rest.sign_on.provider import Provider, RefusedLogInError
from resource_manager.rest.signing import serializer
from resource_manager.rest.tokens import Token

LOG_IN_S = 600
"""Time that a person may take to log in at the provider."""

SALT = "gpu-manager-sign-on"

RATE = "300/minute"
"""Calls of one address that ask the provider."""


@dataclass(slots=True)
class SignOnDesk:
    """Desk at which people log in, at the provider that the cluster names now."""

    authenticator: TokenAuthenticator
    settings: Callable[[], SignOn | None]
    secret: str = field(repr=False)
    client_secret: str = field(default="", repr=False)
    _limit: FixedWindow = field(default_factory=lambda: FixedWindow(RATE))
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _used: dict[str, float] = field(default_factory=dict)
    """Ends of the log-ins that are over, by state: none is ended twice."""
    _provider: Provider | None = None

    def provider(self, address: str) -> Provider:
        """Return the provider for a call from that address; raise 404 if the cluster has none."""
        sign_on = self.settings()
        if sign_on is None:
            raise ProblemError(404, "this service has no sign-on: its cluster has no section [sign_on]")
        self._limit.hit(address)
        with self._guard:
            if self._provider is None or self._provider.sign_on != sign_on:
                try:
                    self._provider = Provider(sign_on, self.client_secret)
                except SettingsError as error:
                    raise ProblemError(503, str(error)) from error
            return self._provider

    def begin(self, provider: Provider, redirect_uri: str, destination: str) -> tuple[str, str]:
        """Return where the browser goes to log in, and the cookie with which it comes back."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        cookie = serializer(self.secret, SALT).dumps([state, nonce, verifier, destination])
        return provider.authorization_url(redirect_uri, state, nonce, verifier), str(cookie)

    def end(
        self, provider: Provider, redirect_uri: str, cookie: str, answer: dict[str, str]
    ) -> tuple[Token, str]:
        """Return the token of who came back from the provider, and where they wanted to go."""
        try:
            signed = serializer(self.secret, SALT).loads(cookie, max_age=LOG_IN_S)
            state, nonce, verifier, destination = signed
        except BadData as error:
            again = "it was begun in another browser, or took too long: begin again"
            raise RefusedLogInError(again) from error
        if not secrets.compare_digest(answer.get("state", "").encode(), state.encode()):
            raise RefusedLogInError("it is not the one that this browser began last: begin again")
        if answer.get("iss", provider.sign_on.issuer) != provider.sign_on.issuer:
            raise RefusedLogInError("another provider answered")
        if "error" in answer:
            raise RefusedLogInError(f"the provider says {answer['error'][:100]!a}")
        self._use(state)
        claims = provider.claims_of_code(answer.get("code", ""), redirect_uri, verifier, nonce)
        token, _ = self._issue(provider.sign_on, claims, SESSION_LIFE_S)
        return token, destination

    def end_device(self, provider: Provider, device_code: str) -> tuple[Token, str] | None:
        """Return the token of who logged in elsewhere, and its text; None while nobody has."""
        claims, sign_on = provider.claims_of_device(device_code), provider.sign_on
        return None if claims is None else self._issue(sign_on, claims, sign_on.token_life_s)

    def _issue(self, sign_on: SignOn, claims: Any, life_s: float) -> tuple[Token, str]:
        person = person_of(sign_on, claims)
        try:
            return self.authenticator.issue(person.name, person.role, person.teams, person.subject, life_s)
        except ValueError as error:  # not a name that a token or an owner may have
            raise RefusedLogInError(str(error)) from error

    def _use(self, state: str) -> None:
        """Raise an error if that log-in has been ended already."""
        now = time.monotonic()
        with self._guard:
            self._used = {each: end for each, end in self._used.items() if end > now}
            if state in self._used:
                raise RefusedLogInError("it is over already: begin again")
            self._used[state] = now + LOG_IN_S
