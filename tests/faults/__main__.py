"""Rounds of faults from the command line: `python -m tests.faults --rounds 3`. Exit code 0 when nothing is wrong."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from tests.faults.plan import NAMES, Plan, plan
from tests.faults.play import Outcome, play
from tests.support import processes

_SHOWN = 20


def main() -> int:
    """Play the rounds; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, help="of the first round; the others follow it")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--histories", type=int, default=0)
    parser.add_argument("--relays", type=int, default=0)
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(1, 1_000_000)
    good = True
    for seed in range(first, first + options.rounds):
        made = plan(seed, only=options.only, histories=options.histories, relays=options.relays)
        print(f"\n=== round {seed - first + 1} of {options.rounds}, seed {seed}", flush=True)
        good = _round(made) and good
    print(f"\n{'green' if good else 'RED'}: {options.rounds} rounds, seeds {first} to {first + options.rounds - 1}")
    return 0 if good else 1


def _round(made: Plan) -> bool:
    # The embedded Postgres may run as another user, who has to get through to its directory.
    directory = Path(tempfile.mkdtemp(prefix="hearth-faults-"))
    directory.chmod(0o755)
    try:
        outcome = asyncio.run(play(made, directory, lambda text: print(text, flush=True)))
    except Exception:  # noqa: BLE001 - a round that breaks is red, and the others are still played
        traceback.print_exc(file=sys.stdout)
        print(f"RED: seed {made.seed}; logs and journals are in {directory}")
        return False
    finally:
        processes.kill_left_behind()
    _show(outcome)
    if outcome.wrong:
        print(f"RED: seed {made.seed}; logs and journals are in {directory}")
        return False
    shutil.rmtree(directory)
    return True


def _show(outcome: Outcome) -> None:
    print(f"{outcome.events} events, {outcome.acknowledged} answers, {outcome.frames} frames")
    for name, verdict in outcome.verdicts.items():
        print(f"  {name:9} {verdict.checked:8} checked, {len(verdict.wrong)} wrong")
    for trouble in outcome.wrong[:_SHOWN]:
        print(f"    {trouble}")
    if len(outcome.wrong) > _SHOWN:
        print(f"    and {len(outcome.wrong) - _SHOWN} more")


if __name__ == "__main__":
    sys.exit(main())
