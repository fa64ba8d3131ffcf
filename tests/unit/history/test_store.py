"""What the callers of a group are told when Postgres fails it: the same as everybody else is told of that error."""

from __future__ import annotations

import asyncpg
import pytest

from services.chassis.errors import Internal, Unavailable
from services.history.store import failure_of


@pytest.mark.parametrize("state", ["08006", "25006", "25P03", "53100", "53200", "57P01", "57P05", "58030"])
def test_a_group_that_an_outage_failed_may_be_sent_again(state: str) -> None:
    failure = failure_of(asyncpg.PostgresError.new({"C": state, "M": "x"}))
    assert isinstance(failure, Unavailable)
    assert failure.metadata == {"dependency": "Postgres"}


@pytest.mark.parametrize("state", ["25P02", "42P01", "XX001"])
def test_a_group_that_a_defect_failed_is_told_so(state: str) -> None:
    assert isinstance(failure_of(asyncpg.PostgresError.new({"C": state, "M": "x"})), Internal)
