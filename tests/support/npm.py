"""Packages from npm for tests: installed once, by one process at a time, without running their scripts."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_OPTIONS = ("--no-save", "--ignore-scripts", "--no-audit", "--no-fund")
_UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "E401", "E403")
_SHOWN = 2000


class Unavailable(Exception):
    """They cannot be had here; the text says why."""


def modules(prefix: Path, packages: Sequence[str], *, seconds: float) -> Path:
    """The `node_modules` below `prefix` with these packages, as `pi-acp@0.0.34`; made anew when it has others.

    Raises `Unavailable`, also when they are not there after `seconds`, and RuntimeError when npm refuses them.
    """
    prefix.mkdir(parents=True, exist_ok=True)
    folder = prefix / "node_modules"
    with (prefix / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not there(prefix, packages):
            done = prefix / ".installed"
            done.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            _install(prefix, packages, seconds)
            done.write_text("\n".join(packages))
    return folder


def there(prefix: Path, packages: Sequence[str]) -> bool:
    """Whether they are installed already."""
    done = prefix / ".installed"
    return done.exists() and done.read_text() == "\n".join(packages)


def _install(prefix: Path, packages: Sequence[str], seconds: float) -> None:
    what = ", ".join(packages)
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable(f"npm is not installed, so {what} cannot be had; it comes with Node")
    command = [npm, "install", *_OPTIONS, "--prefix", str(prefix), *packages]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the npm registry did not deliver {what} in {seconds:g} s") from None
    said = result.stderr.strip()
    if result.returncode != 0 and any(code in said for code in _UNREACHABLE):
        raise Unavailable(f"the npm registry cannot be reached for {what}: {said.splitlines()[0]}")
    if result.returncode != 0:
        raise RuntimeError(f"npm did not install {what}: {said[:_SHOWN]}")
