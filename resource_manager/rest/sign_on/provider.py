"""Provider of OpenID Connect: its endpoints and keys, and what its signed ID tokens say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import httpx

from resource_manager.core.cluster_settings import SignOn
from resource_manager.errors import SettingsError, how_to_install
from resource_manager.jobs.http_client import HttpClient
from resource_manager.manager.cluster_file.sign_on import LOOPBACK_NAMES
from resource_manager.rest.answers import harmless
from resource_manager.rest.problems import ProblemError

TIMEOUT_S = 10.0
KEEP_S = 3600.0
"""Time for which the provider's endpoints and keys are kept; an unknown key is asked for at once."""

MAX_AT_ONCE = 8
"""Calls that wait for the provider at once: each has a thread of the service, and the provider may hang."""

DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"


class RefusedLogInError(ProblemError):
    """Refusal of a log-in: by the provider, or of what the provider says."""

    def __init__(self, detail: str) -> None:
        super().__init__(403, f"the log-in is refused: {detail}")


class Provider:
    """Client of the provider that the cluster names; `secret` is that of this service there, if any."""

    def __init__(self, sign_on: SignOn, secret: str = "") -> None:
        try:
            from resource_manager.rest.sign_on import id_token
        except ModuleNotFoundError as error:
            missing = f"[sign_on] of the cluster needs {error.name}: {how_to_install('sign-on')}"
            raise SettingsError(missing) from error
        self._id_token = id_token
        self.sign_on = sign_on
        self._secret = secret
        self._http = HttpClient(timeout=TIMEOUT_S, headers={"Accept": "application/json"})
        self._kept: dict[str, tuple[float, dict[str, Any]]] = {}
        self._turns = threading.Semaphore(MAX_AT_ONCE)

    def authorization_url(self, redirect_uri: str, state: str, nonce: str, verifier: str) -> str:
        """Return the address at which a browser begins a log-in by code, with PKCE (RFC 7636)."""
        query = {
            "response_type": "code",
            "client_id": self.sign_on.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self.sign_on.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": self._id_token.create_s256_code_challenge(verifier),
            "code_challenge_method": "S256",
        }
        address = self._endpoint("authorization_endpoint")
        return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"

    def claims_of_code(self, code: str, redirect_uri: str, verifier: str, nonce: str) -> Mapping[str, Any]:
        """Return what the provider says of who logged in; raises `ProblemError`."""
        grant = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri}
        answer = self._post("token_endpoint", {**grant, "code_verifier": verifier})
        return self._claims(_accepted(answer), nonce)

    def begin_device(self) -> dict[str, Any]:
        """Begin a log-in on another device (RFC 8628) and return the provider's answer, with its codes."""
        answer = self._post("device_authorization_endpoint", {"scope": " ".join(self.sign_on.scopes)})
        begun: dict[str, Any] = _accepted(answer)
        texts = ("device_code", "user_code", "verification_uri")
        if not all(isinstance(begun.get(name), str) for name in texts):
            raise self._broken("its answer to a device lacks a code")
        return begun

    def claims_of_device(self, device_code: str) -> Mapping[str, Any] | None:
        """Return what the provider says of who logged in, None while they have not; raises `ProblemError`."""
        answer = self._post("token_endpoint", {"grant_type": DEVICE_GRANT, "device_code": device_code})
        if answer.get("error") in ("authorization_pending", "slow_down"):
            return None
        return self._claims(_accepted(answer), None)

    def _claims(self, answer: Mapping[str, Any], nonce: str | None) -> Mapping[str, Any]:
        """Return the claims of a signed ID token that is meant for this service, and for this log-in."""
        text = answer.get("id_token")
        if not isinstance(text, str):
            raise self._broken("it sent no ID token")
        try:
            return self._id_token.verified_claims(
                text,
                self.sign_on,
                self._keys,
                nonce=nonce,
                access_token=answer.get("access_token"),
                now=time.time(),
            )
        except ValueError as error:
            reason = str(harmless(str(error)))[:250]
            raise RefusedLogInError(f"the ID token of {self.sign_on.issuer} {reason}") from error

    def _keys(self, fresh: bool) -> dict[str, Any]:
        address = self._endpoint("jwks_uri")
        if fresh:
            self._kept.pop(address, None)
        return self._get(address)

    def _endpoint(self, name: str) -> str:
        """Return an address that the provider publishes; secrets are sent there, so nobody may listen in."""
        issuer = self.sign_on.issuer
        place = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        published = self._get(place)
        if published.get("issuer") != issuer:
            self._kept.pop(place, None)  # it may be mended soon
            stated = str(harmless(str(published.get("issuer"))))[:250]
            raise self._broken(f"it calls itself {stated}: issuer of [sign_on] must be exactly that")
        address = published.get(name)
        if not isinstance(address, str):
            raise self._broken(f"it has no {name}")
        try:
            parts = httpx.URL(address)
        except httpx.InvalidURL as error:
            raise self._broken(f"its {name} is no address: {error}") from error
        if parts.scheme != "https" and parts.host not in LOOPBACK_NAMES:
            raise self._broken(f"its {name} does not begin with https://")
        return address

    def _get(self, address: str) -> dict[str, Any]:
        at, kept = self._kept.get(address, (float("-inf"), {}))
        if time.time() - at > KEEP_S:
            kept = self._answer(lambda: self._http.get(address))
            if "error" in kept:
                raise self._broken(f"{address} answers {kept['error']}")
            self._kept[address] = (time.time(), kept)
        return kept

    def _post(self, endpoint: str, form: dict[str, str]) -> dict[str, Any]:
        address = self._endpoint(endpoint)
        body = {**form, "client_id": self.sign_on.client_id}
        if self._secret:
            body["client_secret"] = self._secret
        return self._answer(lambda: self._http.post(address, data=body))

    def _answer(self, call: Callable[[], httpx.Response]) -> dict[str, Any]:
        """Return the JSON of an answer; that of an error has `error`."""
        if not self._turns.acquire(blocking=False):
            raise self._broken(f"{MAX_AT_ONCE} log-ins wait for its answer already")
        try:
            answer = call()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self._broken(str(error) or type(error).__name__) from error
        finally:
            self._turns.release()
        try:
            found = answer.json()
        except (ValueError, RecursionError):  # a page for people, as where the issuer is wrong
            found = None
        if not isinstance(found, dict) or (answer.is_error and not isinstance(found.get("error"), str)):
            raise self._broken(f"{answer.url.path} answers with status {answer.status_code}")
        return found

    def _broken(self, reason: str) -> ProblemError:
        detail = f"{self.sign_on.issuer} cannot log anybody in: {reason}"
        return ProblemError(503, detail, retry_after_s=5)


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer; raise the provider's refusal."""
    if "error" in answer:
        said = (str(answer[name]) for name in ("error", "error_description") if answer.get(name))
        raise RefusedLogInError(str(harmless(": ".join(said)))[:500])
    return answer
