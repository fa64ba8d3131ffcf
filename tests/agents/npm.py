"""npm packages of agents, installed once for all clones on this machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SECONDS = 400
_UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "E401", "E403")


def cache() -> Path:
    """Where they lie: HEARTH_AGENTS_CACHE, or below the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HEARTH_AGENTS_CACHE") or Path(base, "hearth", "agents")).expanduser()


def installed(name: str, packages: Sequence[str]) -> Path:
    """The `node_modules` with these packages, as `pi-acp@0.0.34`, without having run their scripts.

    Skips the test where they cannot be had.
    """
    prefix = cache() / name
    prefix.mkdir(parents=True, exist_ok=True)
    done, wanted = prefix / ".installed", "\n".join(packages)
    with (prefix / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != wanted:
            shutil.rmtree(prefix / "node_modules", ignore_errors=True)
            _install(prefix, packages)
            done.write_text(wanted)
    return prefix / "node_modules"


def _install(prefix: Path, packages: Sequence[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed, so {', '.join(packages)} cannot be had")
    options = ["--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(prefix)]
    try:
        command = [npm, "install", *options, *packages]
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the npm registry did not deliver {', '.join(packages)} in {SECONDS} s")
    if result.returncode != 0 and any(code in result.stderr for code in _UNREACHABLE):
        pytest.skip(f"the npm registry cannot be reached: {result.stderr.strip().splitlines()[0]}")
    assert result.returncode == 0, result.stderr
