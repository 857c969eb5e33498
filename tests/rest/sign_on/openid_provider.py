"""Provider of OpenID Connect as a real HTTP server, which logs everybody in as its one person at once."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlencode, urlsplit

from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT = "gpu-manager"


@dataclass
class OpenIdProvider:
    """Provider with one client, whose answers a test may bend."""

    redirect_uris: tuple[str, ...] = ("http://localhost/signed-on",)
    client_secret: str = ""
    person: dict[str, Any] = field(
        default_factory=lambda: {"sub": "4711", "preferred_username": "ada", "groups": ["gpu-users"]}
    )
    claims: dict[str, Any] = field(default_factory=dict)
    """Claims that replace those of the ID token; None takes one out."""
    metadata: dict[str, Any] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    algorithm: str = "RS256"
    repeats_codes: bool = False
    """Whether a code works again and again, which no provider may allow."""
    logged_in: set[str] = field(default_factory=set)
    """User codes that the person has confirmed on another device."""
    confirms: bool = False
    """Whether the person confirms a code once it was asked for in vain."""
    keys: list[RSAKey] = field(default_factory=list)
    other_keys: list[Any] = field(default_factory=list)
    """What is published beside them."""
    signing: Any = None
    """Key that signs in the place of the last published one."""
    before_answer: Callable[[], object] = lambda: None
    asked: list[str] = field(default_factory=list)
    """Paths asked for, in order."""

    def __post_init__(self) -> None:
        self.codes: dict[str, dict[str, str]] = {}
        self.devices: dict[str, str] = {}
        self.rotate_keys()

    def __enter__(self) -> Self:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider._serve(self, "")

            def do_POST(self) -> None:
                provider._serve(self, self.rfile.read(int(self.headers["Content-Length"])).decode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.issuer = f"http://127.0.0.1:{self._server.server_port}/realm"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def rotate_keys(self) -> None:
        self.keys = [RSAKey.generate_key(2048, {"kid": secrets.token_hex(4), "use": "sig"})]

    def _serve(self, request: BaseHTTPRequestHandler, body: str) -> None:
        parts = urlsplit(request.path)
        self.asked.append(parts.path)
        self.before_answer()
        form = {name: values[0] for name, values in parse_qs(body or parts.query).items()}
        if parts.path == "/realm/authorize":
            request.send_response(302)
            request.send_header("Location", self._authorize(form))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        answers = {
            "/realm/.well-known/openid-configuration": self._metadata,
            "/realm/keys": lambda form: {
                "keys": [*self.other_keys, *(key.as_dict(private=False) for key in self.keys)]
            },
            "/realm/token": self._token,
            "/realm/device": self._device,
        }
        if parts.path not in answers:
            request.send_error(404)
            return
        answer = answers[parts.path](form)
        text = json.dumps(answer).encode()
        request.send_response(400 if "error" in answer else 200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)

    def _metadata(self, form: dict[str, str]) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "device_authorization_endpoint": f"{self.issuer}/device",
            **self.metadata,
        }

    def _authorize(self, form: dict[str, str]) -> str:
        assert form["redirect_uri"] in self.redirect_uris, form["redirect_uri"]
        assert (form["client_id"], form["response_type"], form["code_challenge_method"]) == (
            CLIENT,
            "code",
            "S256",
        )
        assert "openid" in form["scope"].split()
        code = secrets.token_urlsafe(8)
        self.codes[code] = form
        return f"{form['redirect_uri']}?{urlencode({'code': code, 'state': form['state']})}"

    def _device(self, form: dict[str, str]) -> dict[str, Any]:
        code, user_code = secrets.token_urlsafe(8), secrets.token_hex(3)
        self.devices[code] = user_code
        where = {"verification_uri": f"{self.issuer}/device", "interval": 1, "expires_in": 600}
        return {"device_code": code, "user_code": user_code, **where}

    def _token(self, form: dict[str, str]) -> dict[str, Any]:
        if form.get("client_id") != CLIENT or form.get("client_secret", "") != self.client_secret:
            return {"error": "invalid_client"}
        if form["grant_type"] != "authorization_code":
            if self.devices.get(form["device_code"]) not in self.logged_in:
                known = form["device_code"] in self.devices
                if known and self.confirms:
                    self.logged_in.add(self.devices[form["device_code"]])
                return {"error": "authorization_pending" if known else "invalid_grant"}
            return self._tokens(None)
        begun = self.codes.get(form["code"]) if self.repeats_codes else self.codes.pop(form["code"], None)
        if begun is None or begun["redirect_uri"] != form["redirect_uri"]:
            return {"error": "invalid_grant", "error_description": "unknown code"}
        if create_s256_code_challenge(form["code_verifier"]) != begun["code_challenge"]:
            return {"error": "invalid_grant", "error_description": "wrong verifier"}
        return self._tokens(begun["nonce"])

    def _tokens(self, nonce: str | None) -> dict[str, Any]:
        now = int(time.time() + self.clock_ahead_s)
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": nonce}
        claims |= self.person | self.claims
        key = self.signing or self.keys[-1]
        header = {"alg": self.algorithm, "kid": key.kid}
        said = {name: value for name, value in claims.items() if value is not None}
        text = jwt.encode(header, said, key, [self.algorithm])
        return {"access_token": secrets.token_urlsafe(8), "token_type": "Bearer", "id_token": text}
