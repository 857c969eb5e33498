"""Names and modules that are imported on first use."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package; `homes` maps each name to its module."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


def lazy_module(name: str) -> ModuleType:
    """Return the module of that full name; it is executed on the first access to an attribute.

    Not for one that needs an extra: who looks at all modules, such as `inspect`, would fail for want of it.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    package, _, last = name.rpartition(".")
    if package:  # as `import` does
        setattr(sys.modules[package], last, module)
    return module


def program_of(module: str) -> Callable[[], Any]:
    """Return a module's `main`; Ctrl-C while it is loaded ends this process at once, without a traceback."""
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a script
    if hears:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main: Callable[[], Any] = import_module(module).main
    if hears:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main
