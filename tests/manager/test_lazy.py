"""Modules that run at the first look into them."""

from __future__ import annotations

import subprocess
import sys


def test_a_lazy_module_is_bound_on_its_package_as_an_imported_one_is() -> None:
    code = (
        "from resource_manager.lazy import lazy_module\n"
        "import resource_manager\n"
        "module = lazy_module('resource_manager.rest.console.colours')\n"
        "home = resource_manager.rest.console\n"
        "print(vars(home)['colours'] is module, callable(home.colours.assign))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


def test_all_modules_can_be_looked_at_where_no_extra_but_that_of_the_service_is_installed() -> None:
    """As `inspect.stack` does: a module that waits for its first look is executed then."""
    code = (
        "import sys\n"
        "for extra in ('authlib', 'airflow', 'paramiko', 'docker', 'psycopg', 'pymysql'):\n"
        "    sys.modules[extra] = None\n"
        "import resource_manager.rest.app, resource_manager.fleet.opening\n"
        "for module in [*sys.modules.values()]:\n"
        "    getattr(module, '__file__', None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
