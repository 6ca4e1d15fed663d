"""Releases of what a report depends on."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("lightning-gradsim", "torch", "lightning", "opacus", "numpy")


@lru_cache(maxsize=1)
def installed_versions() -> dict[str, str]:
    """Releases by name, of packages that are installed as such."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # a checkout on the path has no metadata
            found[package] = version(package)
    return found
