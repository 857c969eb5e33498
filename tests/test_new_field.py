"""A new field of the demand: the two files that declare it are all that it needs."""

from __future__ import annotations

from pathlib import Path

from tests.edited_product import run_with

DECLARED = {
    "core/models.py": {
        "    preemption_delay_s: float | None = None\n": "    cooling_s: float | None = None\n"
    },
    "manager/demand.py": {
        "    labels: Labels = Field(": '    cooling: Seconds | None = Field(default=None, description="")\n',
        "    labels: Mapping[str, str] | None\n": "    cooling: float | timedelta | None\n",
    },
}
"""Product files that declare a field -> the line that stands beside it -> the line of the new one."""

USES = """
import click, sys
from resource_manager import GPUResourceManager
from resource_manager.cli import main
from resource_manager.cli.lease_commands import submit
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.schemas import AllocateBody

store, = sys.argv[1:]
with GPUResourceManager.from_url(store, inventory=default_inventory(1)) as manager:
    manager.submit("t", 1, cooling="2min")
with GPUResourceManager.from_url(store) as manager:
    [stored] = manager.read(lambda cluster, now: [lease.request for lease in cluster.leases.values()])
    assert stored.cooling_s == 120.0, stored
    try:
        manager.submit("u", 1, cooling=-1)
    except ValueError as error:
        assert str(error).startswith("cooling must be"), error
assert "cooling" in AllocateBody.model_fields
[option] = [each for each in submit.get_params(click.Context(submit)) if each.name == "cooling"]
assert (option.opts, option.metavar) == (["--cooling"], "DURATION"), option.to_info_dict()
"""


def test_a_new_field_is_taken_by_python_store_rest_and_command_line(tmp_path: Path) -> None:
    assert len(DECLARED) <= 2
    run_with(DECLARED, USES, tmp_path, f"sqlite:///{tmp_path}/state.db")
