"""`GPUResourceManager`: the only place where lock, store and allocator meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from resource_manager import allocator, schemas, views
from resource_manager.cluster import ClusterState
from resource_manager.errors import (
    CorruptStateError,
    DuplicateTaskError,
    InvalidRequestError,
    LeaseNotFoundError,
    LockTimeoutError,
    StateLostError,
    UnknownNodeError,
)
from resource_manager.estimates import Confidence, Runtime, estimate_starts
from resource_manager.explain import explain as explain_servers
from resource_manager.inventory import default_inventory, load_inventory
from resource_manager.models import (
    MILLI_PER_GPU,
    Amount,
    Change,
    Drained,
    Granted,
    InventoryChanged,
    Node,
    Request,
    Restored,
    Utility,
    Waiting,
)
from resource_manager.policies import Policy, get_policy, scores_of
from resource_manager.queueing import Order, get_order
from resource_manager.settings import Settings
from resource_manager.stores import Store, open_store
from resource_manager.transactions import Observer, Step, Transactions

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RequestOptions(TypedDict, total=False):
    """What a request may say beyond the original's four arguments; see `models.Request`."""

    gpu_milli: int
    gpu_types: Sequence[str]
    vendor: str
    resources: Mapping[str, Amount] | None
    priority: int
    team: str
    owner: str
    ttl_s: float | None
    required_server: int | str | None
    quarantine: bool
    labels: Mapping[str, str] | None
    expected_runtime_s: float | None
    utility: float | None
    target_s: float | None
    sensitivity_per_s: float


class GPUResourceManager:
    """Leases on named GPUs and CPUs of one server each, kept true in a store many processes share.

    `GPUResourceManager()` reads `Settings`; `from_url` takes everything as arguments. All times are
    seconds of the store's clock. Safe to use from many threads.
    """

    TOTAL_SERVERS: ClassVar[int] = 4
    GPUS_PER_SERVER: ClassVar[int] = 8
    CPUS_PER_SERVER: ClassVar[int] = 64
    RESOURCE_VAR_NAME: ClassVar[str] = "gpu_resource_status"
    LOCK_VAR_NAME: ClassVar[str] = "gpu_resource_lock"

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        store: Store | None = None,
        inventory: Iterable[Node] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.settings = Settings.load() if settings is None else settings
        if inventory is None and self.settings.inventory is not None:
            inventory = load_inventory(self.settings.inventory)
        self._inventory_is_explicit = inventory is not None
        self.inventory: tuple[Node, ...] = (
            default_inventory(self.TOTAL_SERVERS, self.GPUS_PER_SERVER, self.CPUS_PER_SERVER)
            if inventory is None
            else tuple(inventory)
        )
        self.store = open_store(self.settings.store, self.settings) if store is None else store
        self._state = Transactions(
            self.store,
            get_policy(self.settings.policy),
            replace(
                get_order(self.settings.order, self.settings.team_quotas),
                admission=self.settings.price_admission(),
            ),
            lambda: ClusterState(self.inventory).snapshot(),
            self.settings.lock_timeout_s,
            observer,
        )
        self._initialise()

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        inventory: Iterable[Node] | str | Path | None = None,
        policy: str = "first_fit",
        order: str = "fifo",
        observer: Observer | None = None,
        **settings: Any,
    ) -> GPUResourceManager:
        """A manager on the store at `url`; reads nothing from the environment.

        `inventory` is a TOML file or nodes; other keywords are fields of `Settings`.
        """
        if isinstance(inventory, str | Path):
            inventory = load_inventory(inventory)
        return cls(
            Settings(store=url, policy=policy, order=order, **settings),
            inventory=inventory,
            observer=observer,
        )

    @property
    def observer(self) -> Observer | None:
        """Told of everything worth measuring; may be set later."""
        return self._state.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._state.observer = observer

    @property
    def policy(self) -> Policy:
        """The placement policy as of now."""
        return self._state.policy

    @property
    def order(self) -> Order:
        """The order in which the queue is served."""
        return self._state.order

    # ---- the original's interface ----

    def allocate_resources(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, Any] | None:
        """Grants a lease now and returns it as a dict, or None if nothing fits or the lock is not free.

        A request never overtakes those who wait in the queue. Asking again for what the task already
        holds returns the same lease. `options` are the keywords of `build_request`. Raises `ValueError`
        (`InvalidRequestError`) for a request that makes no sense, and `StoreError` if the store is out.
        """
        request = self.build_request(task_id, required_gpus, required_cpus, prefer_server_id, **options)
        return self._allocate([request])[0]

    def release_resources(self, task_id: str, *, fencing_token: int | None = None, outcome: str = "") -> bool:
        """Ends the task's lease; False if it holds none (with that fencing token) or the lock is not free.

        `outcome` (SUCCESS, FAILED, …) goes into the history.
        """
        try:
            self._change(
                lambda cluster, now: self._state.settle(
                    cluster,
                    allocator.release(cluster, task_id, now, fencing_token=fencing_token, outcome=outcome),
                    now,
                )
            )
        except LeaseNotFoundError as error:
            logger.warning("not released: %s", error)
            return False
        except LockTimeoutError as error:
            logger.error("not released: %s", error)
            return False
        logger.info("released task %r", task_id)
        return True

    def get_resource_summary(self) -> dict[str, Any]:
        """What is free and held on every server; at most `cache_ttl_s` old."""
        return self._state.read(lambda cluster, now: views.summary(cluster), self.settings.cache_ttl_s)

    def reset_resources(self) -> bool:
        """Drops every lease and the queue and starts anew from the inventory; False if the lock is not free.

        Dangerous while jobs run. Fencing numbers go on growing, so no old holder can be mistaken.
        """
        try:
            self._state.replace(ClusterState(self.inventory).snapshot())
        except LockTimeoutError as error:
            logger.error("not reset: %s", error)
            return False
        logger.warning("all resources were reset")
        return True

    def allocate_batch(self, requests: Iterable[Mapping[str, Any] | Request]) -> list[dict[str, Any] | None]:
        """As `allocate_resources` for each, in one commit; each is granted or None on its own.

        A mapping has the argument names of `allocate_resources`.
        """
        return self._allocate(
            [item if isinstance(item, Request) else self.build_request(**item) for item in requests]
        )

    # ---- leases and the queue ----

    def submit(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, Any]:
        """Queues the request; returns an allocation (`state` RUNNING) or a queue entry (WAITING).

        Submitting the same again returns what the task holds or where it waits. Raises as
        `allocate_resources` does, and `LockTimeoutError`.
        """
        request = self.build_request(task_id, required_gpus, required_cpus, prefer_server_id, **options)

        def step(cluster: ClusterState, now: float) -> list[Change]:
            if self._same_as_before(cluster, request):
                return []
            return allocator.submit(cluster, request, self.policy, self.order, now)

        self._change(step)
        status = self.status_of(task_id)
        if status is None:  # granted and ended by someone else since
            raise LeaseNotFoundError(task_id)
        return status

    def cancel(self, task_id: str, *, reason: str = "") -> bool:
        """Takes a waiting task out of the queue; False if it does not wait."""
        try:
            self._change(
                lambda cluster, now: self._state.settle(
                    cluster, allocator.cancel(cluster, task_id, now, reason), now
                )
            )
        except LeaseNotFoundError:
            return False
        return True

    def renew(self, task_id: str, *, fencing_token: int | None = None) -> dict[str, Any]:
        """Counts the lease's life anew from now; raises `LeaseNotFoundError` if it is over."""
        self._change(lambda cluster, now: allocator.renew(cluster, task_id, now, fencing_token=fencing_token))
        status = self.status_of(task_id)
        if status is None or status["state"] == "WAITING":
            raise LeaseNotFoundError(task_id, fencing_token)
        return status

    def status_of(self, task_id: str) -> dict[str, Any] | None:
        """The task's allocation (RUNNING, or ERROR in quarantine), its queue entry (WAITING), or None."""

        def look(cluster: ClusterState, now: float) -> dict[str, Any] | None:
            lease = cluster.leases.get(task_id)
            if lease is not None:
                return views.allocation(cluster, lease)
            if task_id not in cluster.waiting:
                return None
            return next(entry for entry in self._queue(cluster, now) if entry["task_id"] == task_id)

        return self._state.read(look)

    def leases(self) -> list[dict[str, Any]]:
        """Every live lease as an allocation, the oldest first."""
        return self._state.read(
            lambda cluster, now: [
                views.allocation(cluster, lease)
                for lease in sorted(cluster.leases.values(), key=lambda lease: lease.fencing_token)
            ]
        )

    def queue(self) -> list[dict[str, Any]]:
        """Every waiting request with its position, in the order in which the queue is served."""
        return self._state.read(self._queue)

    def expected_starts(self) -> dict[str, float]:
        """When each waiting task should start, by the expected runtimes of all before it.

        Seconds of the store's clock. A task is left out if it cannot be told, as when one of those before
        it has no expected runtime.
        """

        def runtime_of(request: Request) -> Runtime | None:
            seconds = request.expected_runtime_s
            return None if seconds is None else Runtime(seconds, Confidence.GOOD)

        def look(cluster: ClusterState, now: float) -> dict[str, float]:
            starts = estimate_starts(cluster, self.policy, self.order, now, runtime_of)
            return {
                task_id: start.at
                for task_id, start in starts.items()
                if start.at is not None and start.confidence > Confidence.POOR
            }

        return self._state.read(look)

    def explain(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, Any]:
        """Whether the request would be granted now, where, and per server why not; changes nothing."""
        request = self.build_request(task_id, required_gpus, required_cpus, prefer_server_id, **options)

        def look(cluster: ClusterState, now: float) -> dict[str, Any]:
            verdicts = explain_servers(cluster, request)
            scores = scores_of(self.policy, cluster, request)
            placement = allocator.choose(cluster, request, self.policy)
            granted = (
                [
                    change
                    for change in allocator.allocate_in_turn(cluster, [request], self.policy, self.order, now)
                    if isinstance(change, Granted) and change.lease.task_id == task_id
                ]
                if not (task_id in cluster.leases or task_id in cluster.waiting)
                else []
            )
            admission = self.order.admission
            return {
                "task_id": task_id,
                "admission": None
                if admission is None
                else views.quotes(cluster, request, admission, placement, now),
                "fits": placement is not None,
                "would_be_granted": bool(granted),
                "could_ever_fit": any(answer.could_fit for answer in verdicts),
                "server_name": placement.node if placement else None,
                "gpu_ids": list(placement.gpu_ids) if placement else [],
                "ahead_in_queue": len(cluster.waiting),
                "policy": self.settings.policy,
                "servers": [views.verdict(answer, scores.get(answer.node)) for answer in verdicts],
            }

        return self._state.read(look)

    def history(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The changes after version `after`, oldest first: `version` and the change's own keys."""
        return [
            {"version": version, **schemas.change_to_dict(change)}
            for version, change in self.store.history(after, limit)
        ]

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values, as `schemas.snapshot_from_dict` reads it."""
        return self._state.read(lambda cluster, now: schemas.snapshot_to_dict(cluster.snapshot()))

    # ---- servers ----

    def drain(self, server: int | str, *, reason: str = "", failed: bool = False) -> dict[str, Any]:
        """Gives the server no new leases; those it has live on. `failed` marks it as broken."""
        return self._server_change(server, lambda name, now: Drained(name, now, reason, failed))

    def restore(self, server: int | str) -> dict[str, Any]:
        """Lets a drained server take leases again, and grants what waits and now fits."""
        return self._server_change(server, Restored)

    def apply_inventory(self, nodes: Iterable[Node]) -> None:
        """Makes these the servers; one that is missing but in use stays, closed, until it is free."""
        self.inventory = tuple(nodes)
        self._change(lambda cluster, now: [InventoryChanged(self.inventory, now)], alone=True)
        self.sweep()

    def sweep(self) -> list[dict[str, Any]]:
        """Ends what is over and grants what fits; returns the changes made."""
        changes = self._change(lambda cluster, now: self._state.settle(cluster, [], now))
        return [schemas.change_to_dict(change) for change in changes]

    def close(self) -> None:
        """Closes the store's connections."""
        self.store.close()

    def __enter__(self) -> GPUResourceManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests ----

    def build_request(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        *,
        gpu_milli: int = MILLI_PER_GPU,
        gpu_types: Sequence[str] = (),
        vendor: str = "",
        resources: Mapping[str, Amount] | None = None,
        priority: int = 0,
        team: str = "",
        owner: str = "",
        ttl_s: float | None = None,
        required_server: int | str | None = None,
        quarantine: bool = False,
        labels: Mapping[str, str] | None = None,
        expected_runtime_s: float | None = None,
        utility: float | None = None,
        target_s: float | None = None,
        sensitivity_per_s: float = 0.0,
    ) -> Request:
        """The request these arguments name; raises `InvalidRequestError` (a `ValueError`) if out of range.

        `required_gpus` lies in the settings' range (2 to 8), or is 1 with a share `gpu_milli` below 1000;
        `required_cpus` is at least 1 and at most what the largest server has. `utility` (with `target_s`,
        `sensitivity_per_s` and `expected_runtime_s`) is what finishing in good time is worth, see
        `models.Utility`; it matters under admission by price.
        """
        settings = self.settings
        for name, value in (("required_gpus", required_gpus), ("required_cpus", required_cpus)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be a whole number, got {value!r}", field=name)
        if gpu_milli == MILLI_PER_GPU and not settings.min_gpus <= required_gpus <= settings.max_gpus:
            raise InvalidRequestError(
                f"required_gpus must be between {settings.min_gpus} and {settings.max_gpus}, "
                f"got {required_gpus}",
                field="required_gpus",
            )
        most_cpus = self._state.known().largest.get("cpus", 0)
        if not 1 <= required_cpus <= most_cpus:
            raise InvalidRequestError(
                f"required_cpus must be between 1 and {most_cpus:g}, got {required_cpus}",
                field="required_cpus",
            )
        return Request(
            task_id=task_id,
            gpus=required_gpus,
            gpu_milli=gpu_milli,
            resources={**(resources or {}), "cpus": required_cpus},
            gpu_types=tuple(gpu_types),
            vendor=vendor,
            preferred_node=None if prefer_server_id is None else self._name_of(prefer_server_id),
            required_node=None if required_server is None else self._name_of(required_server),
            priority=priority,
            team=team,
            owner=owner,
            ttl_s=settings.lease_ttl_s if ttl_s is None else ttl_s,
            expected_runtime_s=expected_runtime_s,
            quarantine=quarantine,
            labels=dict(labels or {}),
            utility=_utility(utility, target_s, sensitivity_per_s),
        )

    def _name_of(self, server: int | str) -> str:
        cluster = self._state.known()
        state = (
            cluster.by_name.get(server)
            if isinstance(server, str)
            else None
            if isinstance(server, bool)
            else cluster.by_server_id.get(server)
        )
        if state is None:
            raise UnknownNodeError(server, len(cluster.nodes))
        return state.name

    def _same_as_before(self, cluster: ClusterState, request: Request) -> bool:
        """Whether the task already holds or waits for just this; raises if it is for something else."""
        lease = cluster.leases.get(request.task_id)
        waiting = cluster.waiting.get(request.task_id)
        if lease is None and waiting is None:
            return False
        before = lease.request if lease is not None else waiting.request  # type: ignore[union-attr]
        if before.shape != request.shape:
            verb = "holds" if lease is not None else "waits for"
            raise DuplicateTaskError(
                request.task_id,
                f"already {verb} {allocator.describe(before)}; release it before asking for "
                f"{allocator.describe(request)}",
            )
        return True

    # ---- the one way to change and to read ----

    def _allocate(self, requests: Sequence[Request]) -> list[dict[str, Any] | None]:
        def step(cluster: ClusterState, now: float) -> list[Change]:
            fresh = [request for request in requests if not self._same_as_before(cluster, request)]
            if len({request.task_id for request in fresh}) != len(fresh):
                raise InvalidRequestError("a task id stands twice in one batch", field="task_id")
            return allocator.allocate_in_turn(cluster, fresh, self.policy, self.order, now) if fresh else []

        def held(cluster: ClusterState) -> list[dict[str, Any] | None]:
            return [
                views.allocation(cluster, lease)
                if (lease := cluster.leases.get(request.task_id)) is not None
                else None
                for request in requests
            ]

        try:
            _, results = self._state.run(step, held)
        except LockTimeoutError as error:
            logger.error("not allocated: %s", error)
            return [None] * len(requests)
        for request, result in zip(requests, results, strict=True):
            if result is None:
                logger.warning("no room for task %r: %s", request.task_id, allocator.describe(request))
            else:
                logger.info(
                    "task %r holds GPUs %s of %s",
                    request.task_id,
                    result["gpu_devices"],
                    result["server_name"],
                )
        return results

    def _server_change(self, server: int | str, make: Callable[[str, float], Change]) -> dict[str, Any]:
        name = self._name_of(server)
        _, view = self._state.run(
            lambda cluster, now: self._state.settle(cluster, [make(name, now)], now),
            lambda cluster: views.server(cluster.node(name)),
        )
        return view

    def _queue(self, cluster: ClusterState, now: float) -> list[dict[str, Any]]:
        entries = []
        for position, entry in enumerate(self.order(cluster, now), 1):
            if refused := self._refused_by_price(cluster, entry, now):
                reason = refused
            elif position > 1:
                reason = f"{position - 1} ahead in the queue"
            else:
                reason = f"no server has room for {allocator.describe(entry.request)}"
            entries.append(views.waiting(entry, position, reason, now))
        return entries

    def _refused_by_price(self, cluster: ClusterState, entry: Waiting, now: float) -> str | None:
        """Why a request waits that fits but is not worth its price; None if that is not the case."""
        admission = self.order.admission
        if admission is None or entry.request.utility is None:
            return None
        placement = allocator.choose(cluster, entry.request, self.policy)
        if placement is None:
            return None
        quote = admission.quote(cluster.node(placement.node), entry.request, entry.queued_at, now)
        if quote.covered:
            return None
        return f"worth {quote.utility:g} now, and the price on {placement.node} is {quote.price:g}"

    def _change(self, step: Step, *, alone: bool = False) -> list[Change]:
        return self._state.run(step, lambda cluster: None, alone=alone)[0]

    def _initialise(self) -> None:
        try:
            cluster = self._state.known()
        except (CorruptStateError, StateLostError) as error:
            # Every operation will say the same; only a reset is of use, and it needs a manager.
            logger.error("%s", error)
            return
        stored = tuple(state.node for state in cluster.nodes if not state.retired)
        if self._inventory_is_explicit and stored != self.inventory:
            logger.warning("the inventory changed: %d servers, before %d", len(self.inventory), len(stored))
            self.apply_inventory(self.inventory)
        else:
            self.inventory = stored


def _utility(priority: float | None, target_s: float | None, sensitivity_per_s: float) -> Utility | None:
    if priority is None:
        if target_s is not None or sensitivity_per_s:
            raise InvalidRequestError(
                "target_s and sensitivity_per_s need utility beside them", field="utility"
            )
        return None
    if target_s is None:
        raise InvalidRequestError("utility needs target_s beside it", field="target_s")
    return Utility(priority, target_s, sensitivity_per_s)


__all__ = ["GPUResourceManager", "Observer"]
