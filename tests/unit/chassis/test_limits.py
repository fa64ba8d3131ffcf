"""A project gets its calls and streams, is told when to come back for more, and costs no other project anything."""

from __future__ import annotations

import pytest

from services.chassis.errors import ResourceExhausted
from services.chassis.limits import Bucket, Limits, Quota


class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_at_its_rate_and_never_over() -> None:
    bucket = Bucket(rate=2.0, burst=2.0, level=2.0, at=0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert bucket.take(0.5) == 0.0
    assert [bucket.take(1_000.0) for _ in range(3)] == [0.0, 0.0, 0.5]


def test_time_that_goes_back_fills_nothing() -> None:
    bucket = Bucket(rate=1.0, burst=1.0, level=0.0, at=10.0)
    assert bucket.take(5.0) == 1.0


def test_a_project_waits_and_others_do_not() -> None:
    time = Time()
    limits, quota = Limits(clock=time), Quota(rate=5.0)
    for _ in range(10):
        limits.call("busy", "read", quota)
    with pytest.raises(ResourceExhausted) as refused:
        limits.call("busy", "read", quota)
    assert refused.value.reason == "OVERLOADED"
    assert refused.value.retry_after == pytest.approx(0.2)
    limits.call("other", "read", quota)
    limits.call("busy", "run", quota)
    time.now += 0.2
    limits.call("busy", "read", quota)


def test_a_rate_that_changes_counts_at_once() -> None:
    time = Time()
    limits = Limits(clock=time)
    for _ in range(20):
        limits.call("busy", "read", Quota(rate=10.0))
    time.now += 1
    limits.call("busy", "read", Quota(rate=1.0))
    with pytest.raises(ResourceExhausted, match="more than 1 calls"):
        limits.call("busy", "read", Quota(rate=1.0))
    limits.call("busy", "read", Quota())


def test_streams_are_bounded_for_each_project() -> None:
    limits, quota = Limits(clock=Time()), Quota(streams=2)
    limits.open_stream("busy", quota)
    limits.open_stream("busy", quota)
    with pytest.raises(ResourceExhausted):
        limits.open_stream("busy", quota)
    limits.open_stream("other", quota)
    limits.close_stream("busy")
    limits.open_stream("busy", quota)


def test_none_is_no_limit() -> None:
    limits, quota = Limits(clock=Time()), Quota()
    for _ in range(1_000):
        limits.call("busy", "read", quota)
        limits.open_stream("busy", quota)
