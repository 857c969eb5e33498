"""Redaction of secrets from URLs for errors, logs and representations."""

from __future__ import annotations


def redact(url: str) -> str:
    """Return the URL without its password and query."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    before_query, _, query = rest.partition("?")
    if "@" not in before_query and "@" in query:  # perhaps a password with an unescaped question mark
        return f"{scheme}{separator}…"
    login, at, place = before_query.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{place}"
