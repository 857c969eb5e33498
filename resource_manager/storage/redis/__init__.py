"""The state in Redis."""

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")
"""Schemes of the URLs of Redis servers, known here without their driver."""
