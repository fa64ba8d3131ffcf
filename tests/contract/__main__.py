"""Runs the suite of history and relay as a stranger would: against addresses, of running processes.

`python -m tests.contract [--replicas 1 2] [arguments of pytest]` starts our services with so many replicas of each, one
count after the other, and gives their addresses to the suite in HEARTH_TEST_TARGET. When that is set already, the suite
runs once, against it. The exit code is 0 when every run was green and no service logged an error or ended badly.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.support.servers import Servers
from tests.support.targets import VARIABLE, Replicas, Stores, Target

_SUITE = ("tests/contract/history", "tests/contract/relay", "tests/contract/test_whole_runs.py")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="replicas of each service, run by run")
    options, rest = parser.parse_known_args()
    given = Target.given(os.environ)
    if given is not None:
        return _suite(given, rest)
    results = {count: _ours(count, rest) for count in options.replicas}
    for count, wrong in results.items():
        print(f"conformance, {count} of each: {'; '.join(wrong) or 'green'}")
    return 1 if any(results.values()) else 0


def _ours(count: int, rest: list[str]) -> list[str]:
    """Run against `count` replicas of our own; what was wrong."""
    servers = Servers()
    dsn = servers.create_database()
    replicas = Replicas(servers.scratch(), Stores(dsn, servers.empty_valkey()), histories=count, relays=count)
    try:
        replicas.start()
        code = _suite(replicas.target, rest)
        return [f"the suite ended with {code}"] * (code != 0) + replicas.stop()
    finally:
        replicas.stop()
        servers.close()


def _suite(target: Target, rest: list[str]) -> int:
    environment = {**os.environ, VARIABLE: str(target)}
    return subprocess.call([sys.executable, "-m", "pytest", *_SUITE, *rest], env=environment)


if __name__ == "__main__":
    sys.exit(main())
