"""Settings of the cluster: how it grants, stored with its state, so that all processes decide alike."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from resource_manager.core.models import USER_PRIORITY

MAINTENANCE_GUARD_S = 28_800.0
"""Assumed runtime of a request that states none, before a maintenance window."""


@dataclass(frozen=True, slots=True)
class HealthRule:
    """Action on a condition of a GPU; `text` and `todo` are for people, empty as in the built-in table.

    With `recovers` a GPU that was closed for it is opened once reports no longer show it.
    """

    condition: str
    action: str
    text: str = ""
    todo: str = ""
    recovers: bool = False


@dataclass(frozen=True, slots=True)
class SignOnGroup:
    """Rights of a group of the sign-on provider: a role, and the teams its members may name; none: any."""

    group: str
    role: str
    teams: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SignOn:
    """Provider of OpenID Connect that says who people are, and what its groups may do.

    `name_claim` and `groups_claim` are the claims of its ID tokens that name the person, who then owns
    leases under that name, and their groups. A log-in on the command line holds for `token_life_s`.
    """

    issuer: str
    client_id: str
    groups: tuple[SignOnGroup, ...]
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    name_claim: str = "preferred_username"
    groups_claim: str = "groups"
    token_life_s: float = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Notice:
    """Address of a webhook, and the events that it is sent: of all teams, or of the leases of one.

    Who knows the address may write to it, so it is shown `masked`. `private`: it may redirect to one of a
    private network.
    """

    on: tuple[str, ...]
    to: str
    team: str = ""
    private: bool = False

    @property
    def masked(self) -> Notice:
        """The same with its host alone, and a digest by which the whole address is found again."""
        if self.is_masked:
            return self
        scheme, _, rest = self.to.partition("://")
        host = re.split("[/?#]", rest, maxsplit=1)[0]
        return replace(self, to=f"{scheme}://{host}/***{hashlib.sha256(self.to.encode()).hexdigest()[:8]}")

    @property
    def is_masked(self) -> bool:
        return _MASKED.search(self.to) is not None


_MASKED = re.compile(r"/\*\*\*[0-9a-f]{8}$")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of the whole cluster, as its file states them; no process has others.

    `policy_package` is the distribution that brings the policy, empty for a built-in one. `admission` is
    `open` or `price`, with the prices of an idle and of a full server. Without `min_gpus` and `max_gpus` the
    inventory gives the range. `rogue` is `avoid` or `ignore`. `prices` are those of an hour of a GPU by type,
    for reports; `health` replaces rules of the built-in table; without `sign_on` people have tokens only.
    `confine` is `off`, `try` or `must`, for servers that state none; `writable` is added to theirs.
    """

    policy: str = "first_fit"
    policy_package: str = ""
    order: str = "priority+backfill"
    admission: str = "open"
    price_low: float | None = None
    price_high: float | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None
    max_priority: int = USER_PRIORITY
    lease_ttl_s: float = 86_400.0
    maintenance_guard_s: float = MAINTENANCE_GUARD_S
    confirmation_window_s: float = 60.0
    clean_timeout_s: float = 60.0
    silent_after_s: float = 60.0
    rogue: str = "avoid"
    idle_below: float = 5.0
    idle_after_s: float = 3600.0
    idle_action: str = "warn"
    confine: str = "off"
    writable: tuple[str, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    health: tuple[HealthRule, ...] = ()
    sign_on: SignOn | None = None
    notices: tuple[Notice, ...] = ()

    @property
    def masked(self) -> ClusterSettings:
        """The settings as people see them: without the secrets in the addresses of notices."""
        return replace(self, notices=tuple(notice.masked for notice in self.notices))
