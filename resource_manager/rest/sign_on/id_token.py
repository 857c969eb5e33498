"""ID tokens (OpenID Connect Core 1.0): their signatures and claims; needs the extra `sign-on`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import BadSignatureError, ExpiredTokenError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from resource_manager.core.cluster_settings import SignOn

__all__ = ["create_s256_code_challenge", "verified_claims"]

LEEWAY_S = 60
"""Difference between the clocks of provider and service that is allowed."""

ALGORITHMS = [f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)]
"""Signatures by the provider's own key: neither none at all, nor by a secret that this service shares."""

Keys = Callable[[bool], dict[str, Any]]
"""Function that returns the provider's published keys; if True, as they are now."""

FUTURE = "is of the future: are the clocks of the provider and of this service right?"
REASONS = {
    "iss": "is another provider's",
    "aud": "is for another service",
    "azp": "is for another service",
    "nonce": "is of another log-in",
    "iat": FUTURE,
    "nbf": FUTURE,
}
"""What is wrong, by claim."""


def verified_claims(
    text: str, sign_on: SignOn, keys: Keys, *, nonce: str | None, access_token: object, now: float
) -> Mapping[str, Any]:
    """Return the claims of an ID token that the provider signed for this service, and for this log-in.

    A log-in without a browser has no `nonce`. Raises `ValueError` with the reason.
    """
    wanted = {
        name: {"essential": True, "value": value}
        for name, value in (("iss", sign_on.issuer), ("aud", sign_on.client_id))
    }
    known = {"nonce": nonce, "client_id": sign_on.client_id, "access_token": access_token}
    try:
        token = _verified(text, keys)
        claims = CodeIDToken(token.claims, token.header, wanted, known)
        claims.validate(now=int(now), leeway=LEEWAY_S)
    except JoseError as error:
        raise ValueError(_reason(error)) from error
    return dict(claims)


def _verified(text: str, keys: Keys) -> jwt.Token:
    """Return the token whose signature is right, also by a key that the provider has only just made."""
    try:
        return jwt.decode(text, _key_set(keys(False)), ALGORITHMS)
    except (InvalidKeyIdError, BadSignatureError):
        return jwt.decode(text, _key_set(keys(True)), ALGORITHMS)


def _key_set(published: dict[str, Any]) -> KeySet:
    """Return the keys for signatures that can be read; others do not matter (RFC 7517, section 5)."""
    found, why = [], "there are none for signatures"
    listed = published.get("keys")
    for key in listed if isinstance(listed, list) else ():
        try:
            if key["kty"] != "oct" and key.get("use", "sig") == "sig":
                found += KeySet.import_key_set({"keys": [key]}).keys
        except (JoseError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = str(error)
    if not found:
        raise ValueError(f"its keys cannot be read: {why}")
    return KeySet(found)


def _reason(error: JoseError) -> str:
    if isinstance(error, ExpiredTokenError):
        return "has expired: are the clocks of the provider and of this service right?"
    if isinstance(error, BadSignatureError | InvalidKeyIdError):
        return "is not signed by any of its keys"
    return REASONS.get(getattr(error, "claim", ""), str(error))
