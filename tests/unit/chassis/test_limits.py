"""A project gets its calls and streams, is told when to come back for more, and costs no other project anything."""

from __future__ import annotations

import pytest

from services.chassis.errors import ResourceExhausted
from services.chassis.limits import Bucket, Limits


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
    limits = Limits(rate=5.0, streams=0, clock=time)
    for _ in range(10):
        limits.call("busy", "read")
    with pytest.raises(ResourceExhausted) as refused:
        limits.call("busy", "read")
    assert refused.value.reason == "OVERLOADED"
    assert refused.value.retry_after == pytest.approx(0.2)
    limits.call("other", "read")
    limits.call("busy", "run")
    time.now += 0.2
    limits.call("busy", "read")


def test_streams_are_bounded_for_each_project() -> None:
    limits = Limits(rate=0.0, streams=2, clock=Time())
    limits.open_stream("busy")
    limits.open_stream("busy")
    with pytest.raises(ResourceExhausted):
        limits.open_stream("busy")
    limits.open_stream("other")
    limits.close_stream("busy")
    limits.open_stream("busy")


def test_none_is_no_limit() -> None:
    limits = Limits(rate=0.0, streams=0, clock=Time())
    for _ in range(1_000):
        limits.call("busy", "read")
        limits.open_stream("busy")
