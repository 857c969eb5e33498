"""Advice on installing the optional dependencies."""

from __future__ import annotations

from resource_manager import __version__


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of `pyproject.toml`, from a checkout and from a wheel."""
    wheel = f"gpu_resource_manager-{__version__}-py3-none-any.whl"
    return f"pip install '.[{extra}]' in a checkout, or pip install '{wheel}[{extra}]'"
