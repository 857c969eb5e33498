"""Bugs to plant in a worker's process, each of which the checker must find."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from resource_manager import allocator
from resource_manager.models import Released
from resource_manager.stores import RedisStore

BUGS = ("no version check", "no fencing", "lost release")


def plant(bug: str) -> None:
    if bug == "no version check":
        from resource_manager import redis_client

        load = redis_client.load_script.__wrapped__

        def careless(*names: str) -> redis_client.Script:
            text = load(*names).text
            return redis_client.Script(text.replace("if version ~= expected then", "if false then"))

        from resource_manager.stores import redis as redis_store

        redis_store.load_script = careless  # type: ignore[attr-defined]
    elif bug == "no fencing":
        for name in ("release", "renew"):
            setattr(allocator, name, partial(_without_fencing, getattr(allocator, name)))
    elif bug == "lost release":
        commit = RedisStore.commit

        def forgetful(self: RedisStore, version: int, changes: Any, **options: Any) -> None:
            if not all(isinstance(change, Released) for change in changes) or random.random() < 0.8:
                commit(self, version, changes, **options)

        RedisStore.commit = forgetful  # type: ignore[method-assign]
    elif bug:
        raise ValueError(f"unknown bug {bug!r}")


def _without_fencing(step: Any, *arguments: Any, **options: Any) -> Any:
    return step(*arguments, **{**options, "fencing_token": None})
