"""`python -m tests.fuzz --minutes 10 --seed 7`: fuzzes a stack of its own; exit code 1 for what it found."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.session import fuzz, mode

_SLOPE_LIMIT = 1.0


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    spoken = " ".join(mode(given.seed)) or "plain"
    print(f"fuzz: SEED={given.seed} ({spoken}) MINUTES={given.minutes:g}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hearth-fuzz-") as directory:
        Path(directory).chmod(0o755)
        found = asyncio.run(
            fuzz(Path(directory) / ".hearth", seed=given.seed, seconds=60 * given.minutes, workers=given.workers)
        )
    statuses: Counter[str] = Counter()
    for (_, code), number in found.answers.items():
        statuses[code] += number
    print(f"calls: {found.answers.total()}; statuses: {json.dumps(dict(statuses.most_common()))}")
    print(f"RPCs called: {len({path for path, _ in found.answers})}; other attacks: {json.dumps(found.attacks)}")
    print(f"statuses of gRPC's own: {json.dumps(dict(found.of_grpc.most_common()))}")
    for name, growth in found.slopes.items():
        print(f"memory of {name}: {found.memory[name]:.1f} MiB, {growth:+.2f} MiB a minute over the last half")
    problems = list(found.problems)
    problems += [f"memory of {name} grows" for name, growth in found.slopes.items() if growth >= _SLOPE_LIMIT]
    for problem in problems[:40]:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"fuzz: {'failed' if problems else 'passed'}, SEED={given.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
