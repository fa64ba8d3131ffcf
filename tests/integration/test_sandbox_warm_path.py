"""The path of every warm turn is short: one statement and one probe to attach, one statement for many renewals.

Counted, not timed: a count does not depend on what else the machine does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.sandbox.claims import Claim
from services.sandbox.rows import Key
from services.sandbox.states import Disposition, How
from services.sandbox.store import Renewal
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker
from tests.support.sandbox_parts import clear, holder, replica


class Counting:
    """A pool that counts statements."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.statements = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("fetch", "fetchrow", "fetchval", "execute"):
            self.statements += 1
        return getattr(self._pool, name)


async def test_statements_of_a_warm_turn(migrated_dsn: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_MARKER, marker())
    root = scratch / "sandboxes"
    async with replica(migrated_dsn, root) as one:
        me = holder()
        await one.acquire("s", 1, holder=me)
        assert await one.release("s", 1) is Disposition.PARKED
        calls_before = list(one.switches.calls)
        counting = Counting(one.parts.store._pool)
        one.parts.store._pool = counting  # type: ignore[assignment]

        answer = await one.acquire("s", 2, holder=me)
        assert answer.how is How.ATTACHED
        assert [stage.name for stage in answer.stages] == ["probe"]
        assert counting.statements == 1
        assert one.switches.calls == calls_before, "the provider is not asked"

        counting.statements = 0
        assert (await one.acquire("s", 2, holder=me)).how is How.ATTACHED
        assert counting.statements == 1, "the same claim again only reads"

        counting.statements = 0
        assert await one.release("s", 2) is Disposition.PARKED
        assert counting.statements == 4

        counting.statements = 0
        renewals = [Renewal(Key("p1", f"s{number}"), Claim(1, 1), active=True) for number in range(1000)]
        renewals.append(Renewal(Key("p1", "s"), Claim(2, 1), active=False))
        results = await one.parts.store.renew(me, renewals, refresh_after=240)
        assert counting.statements == 1
        assert [result.sandbox_id is not None for result in results] == [False] * 1000 + [True]
    await clear(root)
