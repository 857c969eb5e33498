"""Library of the programs that are sent to servers: the modules which act on jobs in directories there."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import getsource
from types import ModuleType

MODULES = ("job_files", "job_processes", "job_states", "ending", "starting", "attending", "calls")

LOADER = """
def load(sources):
    import sys, types
    for name, source in sources.items():
        module = sys.modules[name] = types.ModuleType(name)
        package, _, last = name.rpartition(".")
        setattr(sys.modules.setdefault(package, types.ModuleType(package)), last, module)
        exec(compile(source, name, "exec"), module.__dict__)
        globals().update({known: value for known, value in vars(module).items() if known[0] != "_"})

"""
"""Program that loads modules which import each other from their packages, and knows their names."""


@cache
def library_of(*more: ModuleType) -> str:
    """Return the program that loads the modules of `jobs.directories`, and more which import them."""
    modules = (*(import_module(f"resource_manager.jobs.directories.{name}") for name in MODULES), *more)
    sources = {module.__name__: getsource(module) for module in modules}
    return f"{LOADER}load({sources!r})\n"
