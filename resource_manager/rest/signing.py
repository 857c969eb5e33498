"""Texts that are signed with their time, such as cookies, for services whose clocks differ a little."""

from __future__ import annotations

from typing import Any

from itsdangerous import SignatureExpired, TimestampSigner, URLSafeTimedSerializer

CLOCKS_DIFFER_S = 60
"""How far the clocks of two services on one store may differ: what one signs may be the other's future."""


class LenientSigner(TimestampSigner):
    """`TimestampSigner` that also takes what was signed up to `CLOCKS_DIFFER_S` later than it is here."""

    def unsign(
        self, signed_value: str | bytes, max_age: int | None = None, return_timestamp: bool = False
    ) -> Any:
        value, signed_at = super().unsign(signed_value, return_timestamp=True)
        age_s = self.get_timestamp() - signed_at.timestamp()
        if max_age is not None and not -CLOCKS_DIFFER_S <= age_s <= max_age:
            raise SignatureExpired(f"signed {age_s:.0f} s ago", payload=value, date_signed=signed_at)
        return (value, signed_at) if return_timestamp else value


def serializer(secret: str, salt: str) -> URLSafeTimedSerializer:
    """Return what signs values for one use, which `salt` names, and reads them again."""
    return URLSafeTimedSerializer(secret, salt=salt, signer=LenientSigner)
