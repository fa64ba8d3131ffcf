"""Which claim stands, and when a lease counts as not renewed: decided over values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sandbox.claims import (
    NO_CLAIM,
    Claim,
    LeaseLimits,
    Leases,
    Reading,
    RenewalVerdict,
    Standing,
    Verdict,
    judge,
    judge_renewal,
    lapsed,
    observe,
)

A, B = "holder-a", "holder-b"


@pytest.mark.parametrize(
    ("claim", "holder", "expected"),
    [
        (Claim(4, 9), A, Verdict.FENCED),
        (Claim(5, 1), A, Verdict.FENCED),
        (Claim(5, 2), A, Verdict.SAME),
        (Claim(5, 2), B, Verdict.FENCED),
        (Claim(5, 3), A, Verdict.NEWER),
        (Claim(6, 1), B, Verdict.NEWER),
    ],
)
def test_order_is_epoch_then_attempt_and_the_same_claim_is_one_holders(
    claim: Claim, holder: str, expected: Verdict
) -> None:
    assert judge(Standing(Claim(5, 2), A, closed=Claim(4, 1)), claim, holder) is expected


def test_a_session_that_was_never_claimed_takes_any_claim() -> None:
    assert judge(None, Claim(7, 3), A) is Verdict.NEWER


def test_closing_reaches_the_same_claim_and_lower_ones_only() -> None:
    standing = Standing(Claim(5, 2), A, closed=Claim(5, 2))
    assert judge(standing, Claim(5, 2), A) is Verdict.CLOSED
    assert judge(standing, Claim(5, 1), A) is Verdict.FENCED
    assert judge(standing, Claim(5, 3), A) is Verdict.NEWER


def test_a_takeover_closes_what_came_before_and_not_its_own_first_try() -> None:
    closed_by_takeover = Standing(Claim(5, 2), A, closed=Claim(6, 0))
    assert judge(closed_by_takeover, Claim(5, 2), A) is Verdict.CLOSED
    assert judge(closed_by_takeover, Claim(5, 7), A) is Verdict.CLOSED
    assert judge(closed_by_takeover, Claim(6, 1), B) is Verdict.NEWER
    assert closed_by_takeover.highest == Claim(6, 0)


def test_a_release_that_comes_before_its_acquire_is_not_undone_by_it() -> None:
    assert judge(Standing(NO_CLAIM, "", closed=Claim(5, 1)), Claim(5, 1), A) is Verdict.CLOSED


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 3), st.sampled_from([A, B])), max_size=30))
def test_whatever_happens_admitted_claims_only_grow_and_are_never_closed(
    steps: list[tuple[bool, int, int, str]],
) -> None:
    standing: Standing | None = None
    for is_acquire, epoch, attempt, holder in steps:
        before = standing or Standing(NO_CLAIM, "", NO_CLAIM)
        claim = Claim(epoch, attempt)
        if not is_acquire:
            standing = Standing(before.claim, before.holder, max(before.closed, claim))
            continue
        claim = Claim(epoch, attempt + 1)
        verdict = judge(standing, claim, holder)
        if verdict is Verdict.NEWER:
            assert claim > before.claim
            assert claim > before.closed
            standing = Standing(claim, holder, before.closed)
        elif verdict is Verdict.SAME:
            assert (claim, holder) == (before.claim, before.holder)
            assert claim > before.closed
        else:
            assert claim <= before.highest


def test_a_renewal_that_found_nothing_is_fenced_by_a_higher_claim_else_gone() -> None:
    standing = Standing(Claim(6, 1), B, NO_CLAIM)
    assert judge_renewal(standing, Claim(5, 1), renewed=True) is RenewalVerdict.OK
    assert judge_renewal(standing, Claim(5, 1), renewed=False) is RenewalVerdict.FENCED
    assert judge_renewal(standing, Claim(6, 1), renewed=False) is RenewalVerdict.GONE
    assert judge_renewal(None, Claim(6, 1), renewed=False) is RenewalVerdict.GONE


LIMITS = LeaseLimits(lease=90.0, gap=10.0)
ONE = Claim(1, 1)


def watch(*readings: tuple[float, int | None], claim: Claim = ONE) -> Leases:
    """Observe one sandbox at (time, renewals); None: it was not among the leases."""
    leases = Leases()
    for now, renewals in readings:
        found = [] if renewals is None else [Reading("s", claim, renewals)]
        leases = observe(leases, found, now, LIMITS)
    return leases


def every_5(start: float, end: float, renewals: int) -> list[tuple[float, int | None]]:
    return [(start + 5 * step, renewals) for step in range(int((end - start) / 5) + 1)]


def test_a_lease_lapses_after_90_seconds_seen_unchanged_and_not_before() -> None:
    assert not lapsed(watch(*every_5(0, 85, 3)), LIMITS)
    found = lapsed(watch(*every_5(0, 90, 3)), LIMITS)
    assert found["s"].renewals == 3
    assert found["s"].claim == ONE


def test_a_renewal_starts_the_time_anew() -> None:
    assert not lapsed(watch(*every_5(0, 85, 3), *every_5(90, 175, 4)), LIMITS)
    assert lapsed(watch(*every_5(0, 85, 3), *every_5(90, 180, 4)), LIMITS)


def test_another_claim_with_the_same_count_is_another_lease() -> None:
    leases = watch(*every_5(0, 85, 3))
    leases = observe(leases, [Reading("s", Claim(2, 1), 3)], 90, LIMITS)
    assert not lapsed(leases, LIMITS)


def test_a_gap_in_the_readings_proves_nothing() -> None:
    assert not lapsed(watch((0, 3), (95, 3)), LIMITS)
    assert not lapsed(watch(*every_5(0, 80, 3), (90.5, 3), (95, 3)), LIMITS)
    assert lapsed(watch(*every_5(0, 80, 3), (90, 3)), LIMITS)


def test_a_sandbox_that_was_worked_on_in_between_starts_anew() -> None:
    assert not lapsed(watch(*every_5(0, 85, 3), (90, None), *every_5(95, 180, 3)), LIMITS)


def test_nothing_lapses_before_the_first_reading() -> None:
    assert not lapsed(Leases(), LIMITS)


LONGEST = 0.99 * LIMITS.gap


@given(
    gaps=st.lists(st.floats(0.1, LONGEST), min_size=60, max_size=120),
    last=st.floats(0.0, 100.0),
)
def test_whenever_a_holder_dies_its_lease_lapses_within_the_bound_and_never_while_it_renews(
    gaps: list[float], last: float
) -> None:
    """S2 in its worst case: the last renewal comes just after a reading, and readings are as far apart as may be."""
    renewed_every = 15.0
    leases, now = Leases(), 0.0
    for gap in [*gaps, *[LONGEST] * 30]:
        now += gap
        renewals = int(min(now, last) // renewed_every)
        leases = observe(leases, [Reading("s", ONE, renewals)], now, LIMITS)
        died = int(last // renewed_every) * renewed_every
        if lapsed(leases, LIMITS):
            assert now >= died + LIMITS.lease
            # One gap until the renewal is seen, one until the reading after the lease; the rest of 120 s is for the
            # work that ends it to begin.
            assert now <= died + LIMITS.lease + 2 * LIMITS.gap
            assert now <= died + 120
            return
    raise AssertionError("it never lapsed")
