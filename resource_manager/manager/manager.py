"""`GPUResourceManager`: a lease service on a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Node
from resource_manager.manager.administration import Administration
from resource_manager.manager.agent_jobs import AgentJobCommands, note_opened
from resource_manager.manager.announcements import Announcements
from resource_manager.manager.cluster_file.reading import load_inventory
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commands import Commands
from resource_manager.manager.commit.asking import checked_by, this_user
from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.protocol import Observer, Transactions
from resource_manager.manager.deadlines import Deadlines
from resource_manager.manager.forecasts import Forecasts
from resource_manager.manager.grants import Grants
from resource_manager.manager.opening import StatedCluster, open_cluster
from resource_manager.manager.original import OriginalNames
from resource_manager.manager.queries import AgentReports, Queries
from resource_manager.manager.queue_view import QueueView, SharedEntries
from resource_manager.manager.stored_jobs import StoredJobs
from resource_manager.settings import Settings
from resource_manager.storage import Store, open_store

CLUSTER_FIELDS = {field.name for field in fields(ClusterSettings)} - {"policy_package"}


class GPUResourceManager(
    Grants, Commands, AgentJobCommands, Queries, Announcements, Deadlines, Administration, OriginalNames
):
    """Leases on named GPUs and CPUs of one server or several, kept in a store that many processes share.

    `GPUResourceManager()` reads `Settings`; `from_url` takes everything as arguments. The cluster is that of
    the store: `inventory` and `cluster`, fields of `ClusterSettings`, are for an empty one. All times are
    seconds of the store's clock. Thread-safe. `by` is who asks, for the history: by default the user of this
    process; `asked_by` names another one for some calls.

    A lease is asked for by the fields of a `Demand`, `submit("t", 2, cpus=8)`, or by a whole one in the place
    of `lease_id`.
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
        cluster: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> None:
        is_original = settings is None
        self.settings = Settings.load() if settings is None else settings
        self.store = store or open_store(
            self.settings.store, self.settings, variable=self.RESOURCE_VAR_NAME, lock=self.LOCK_VAR_NAME
        )
        who = this_user() if by is None else checked_by(by)
        self._commits = Transactions(self.store, self.settings.lock_timeout_s, who)
        self.stored_jobs = StoredJobs(self.store.jobs, self.settings.job_keys)
        self._queue = QueueView(self.store, self._queue_in)
        self._entries = SharedEntries()
        self._forecasts = Forecasts(self.store, self._commits.resuming)
        self._agent_reports: AgentReports | None = None
        scheme = self.settings.store.partition("://")[0]
        has_servers = scheme == "memory" or (is_original and scheme == "airflow")
        self._stated = StatedCluster(
            None if inventory is None else tuple(inventory),
            dict(cluster or {}),
            default_inventory(self.TOTAL_SERVERS, self.GPUS_PER_SERVER, self.CPUS_PER_SERVER)
            if has_servers
            else (),
        )
        open_cluster(self._commits, self._stated)
        note_opened(self)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        inventory: Iterable[Node] | str | Path | None = None,
        by: str | None = None,
        **settings: Any,
    ) -> GPUResourceManager:
        """Return a manager on the store at `url`; nothing is read from the environment.

        `inventory`, nodes or a TOML file, and fields of `ClusterSettings` such as `policy` and `order` are
        those of an empty store; where it has others, `SettingsError` is raised. Other keywords are fields of
        `Settings`. Raises `ClusterFileError` and `StoreError`.
        """
        if isinstance(inventory, str | Path):
            inventory = load_inventory(inventory)
        stated = {name: value for name, value in settings.items() if name in CLUSTER_FIELDS}
        own = Settings.of({"store": url, **{key: settings[key] for key in settings if key not in stated}})
        return cls(own, inventory=inventory, cluster=stated, by=by)

    def observe_by(self, observer: Observer) -> None:
        """Have measurements received by that function."""
        self._commits.observer = observer

    def read_from(self, read: Callable[[Reader[Any]], Any]) -> None:
        """Have reads answered by that function of a reader, with a replica of its own."""
        self._commits.read_elsewhere = read

    def read_reports_by(self, reports: AgentReports) -> None:
        """Have `gpus` and `report` answered from what agents reported."""
        self._agent_reports = reports

    def close(self) -> None:
        """Close the store's connections."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
