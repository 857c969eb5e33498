"""The cluster's description: servers, their NUMA nodes, bandwidths and prices, from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from resource_manager.manager.cluster_file.servers import MAX_SERVERS
from simulator.errors import InputError
from simulator.io.documents import first_error
from simulator.io.rows import MAX_VALUE

Positive = Annotated[int, Field(gt=0, le=MAX_VALUE)]
Price = Annotated[float, Field(ge=0, le=MAX_VALUE, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NumaNodes(_Strict):
    """NUMA nodes of one server: their count, and the cores and MiB of each."""

    count: Positive
    cpu: Positive
    memory: Positive


class ServerType(_Strict):
    """`count` equal servers: `hourly_rate` in dollars, `cold_start_latency` in seconds."""

    name: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=0)]
    hourly_rate: Price
    cold_start_latency: Price
    numa_nodes: NumaNodes


class ClusterConfig(_Strict):
    """Bandwidths in bytes per second, the speed of a core in operations per second, and the servers.

    Raises pydantic's `ValidationError` (a `ValueError`) for an invalid cluster.
    """

    memory_bandwidth: Positive = 100_000_000_000
    numa_bandwidth: Positive = 50_000_000_000
    network_bandwidth: Positive = 10_000_000_000
    single_core_speed: Positive = 1_000_000_000
    servers: tuple[ServerType, ...]

    @model_validator(mode="after")
    def _has_nodes(self) -> Self:
        names = [server.name for server in self.servers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the server type {twice!r} is given twice")
        if self.numa_node_count > MAX_SERVERS:
            raise ValueError(f"{self.numa_node_count:,} NUMA nodes; no more than {MAX_SERVERS:,}")
        if not any(server.count for server in self.servers):
            raise ValueError("the cluster has no NUMA nodes: give at least one server a count above 0")
        return self

    @property
    def numa_node_count(self) -> int:
        """NUMA nodes of all servers together."""
        return sum(server.count * server.numa_nodes.count for server in self.servers)

    @property
    def largest_memory(self) -> int:
        """MiB of the largest NUMA node."""
        return max(server.numa_nodes.memory for server in self.servers if server.count)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ClusterConfig:
        """Read a YAML file; raise `InputError` that names the file and the field."""
        import yaml

        path = Path(path)
        try:
            content = _load_yaml(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            reason = getattr(error, "problem", None) or str(error) or "not a text file"
            line = None if mark is None else mark.line + 1
            raise InputError(f"not YAML: {reason}", path=path, line=line) from error
        if not isinstance(content, dict):
            raise InputError("expected a mapping with the key 'servers'", path=path)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise InputError(first_error(error), path=path) from error

    @classmethod
    def c5(cls, count: int = 1) -> ClusterConfig:
        """Return the eight EC2 c5 types of the original, `count` servers of each (71 NUMA nodes if 1)."""
        return cls(
            servers=tuple(
                ServerType(
                    name=f"c5.{size}",
                    count=count,
                    hourly_rate=rate,
                    cold_start_latency=latency,
                    numa_nodes=NumaNodes(count=nodes, cpu=cpu, memory=memory),
                )
                for size, nodes, cpu, memory, rate, latency in C5_TYPES
            )
        )


def _load_yaml(text: str) -> Any:
    """Return the value in a YAML text without aliases; raises `yaml.YAMLError`.

    Aliases multiply: merged into each other, 500 bytes of them take half a minute.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                reason = f"*{event.anchor[:100]} is an alias; write out what it stands for"
                raise yaml.MarkedYAMLError(problem=reason, problem_mark=event.start_mark)
            return super().compose_node(parent, index)

    loader = Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


C5_TYPES = (
    ("large", 1, 2, 4096, 0.085, 0.5),
    ("xlarge", 1, 4, 8192, 0.17, 0.6),
    ("2xlarge", 2, 4, 8192, 0.34, 0.8),
    ("4xlarge", 4, 4, 8192, 0.68, 1.0),
    ("9xlarge", 9, 4, 8192, 1.53, 1.5),
    ("12xlarge", 12, 4, 8192, 2.04, 2.0),
    ("18xlarge", 18, 4, 8192, 3.06, 3.0),
    ("24xlarge", 24, 4, 8192, 4.08, 4.0),
)
"""(size, NUMA nodes, cores per node, MiB per node, $ per hour, cold start in s)."""
