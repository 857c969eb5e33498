"""How often a caller may call, and how often an address may guess a token."""

from __future__ import annotations

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from resource_manager.api.problems import ProblemError

MAX_BODY_BYTES = 1024 * 1024
DEFAULT_RATE = "1000/second"
FAILURES = "20/minute"


class Limits:
    """Counts in this process, by caller; the strictest place for them is the proxy in front."""

    def __init__(self, rate: str = DEFAULT_RATE) -> None:
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        self._rate: RateLimitItem = parse(rate)
        self._failures: RateLimitItem = parse(FAILURES)

    def count(self, caller: str) -> None:
        """Raises 429 if the caller is over the limit."""
        if not self._limiter.hit(self._rate, "caller", caller):
            raise self._too_many(self._rate)

    def count_failure(self, address: str) -> None:
        self._limiter.hit(self._failures, "failure", address)

    def check_failures(self, address: str) -> None:
        """Raises 429 for an address that guessed too often."""
        if not self._limiter.test(self._failures, "failure", address):
            raise self._too_many(self._failures)

    @staticmethod
    def _too_many(limit: RateLimitItem) -> ProblemError:
        return ProblemError(
            429, f"more than {limit}; wait and try again", headers={"Retry-After": str(limit.get_expiry())}
        )
