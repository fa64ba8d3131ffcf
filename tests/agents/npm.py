"""npm packages of agents, installed once for all clones on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import npm

SECONDS = 400


def cache() -> Path:
    """Where they lie: AGENTS_CACHE, or below the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("AGENTS_CACHE") or Path(base, "hearth", "agents")).expanduser().absolute()


def there(name: str, packages: Sequence[str]) -> bool:
    """Whether they are installed already."""
    return npm.there(cache() / name, packages)


def installed(name: str, packages: Sequence[str]) -> Path:
    """The `node_modules` with these packages, as `pi-acp@0.0.34`.

    Raises `npm.Unavailable` where they cannot be had, and RuntimeError when npm refuses them.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise npm.Unavailable(f"agents are run on linux x86_64 only, this is {sys.platform} {platform.machine()}")
    return npm.modules(cache() / name, packages, seconds=SECONDS)


def node(version: int) -> Path:
    """Where the machine's Node is, of this major version or a newer one. Raises `npm.Unavailable`."""
    found = shutil.which("node")
    if found is None:
        raise npm.Unavailable(f"it needs Node {version}, which is not installed")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    major = told.removeprefix("v").partition(".")[0]
    if not major.isdigit() or int(major) < version:
        raise npm.Unavailable(f"it needs Node {version}, and {found} is {told or 'no Node'}")
    return Path(found).parent
