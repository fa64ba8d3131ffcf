"""Rows in their order, places on the line of time, and lengths of time in words."""

from __future__ import annotations

import pytest

from hearth.tracing.layout import duration, lay_out, ticks
from tests.unit.hearth.tracing.spans import MILLISECOND, span


def test_children_come_below_their_parents_in_the_order_in_which_they_began() -> None:
    spans = [
        span("c", "a", at=5, took=2),
        span("b", "a", at=1, took=2),
        span("d", "b", at=2, took=8),
        span("a", at=0, took=6, service="sandbox"),
    ]
    trace = lay_out(spans)
    assert [(row.span.span_id, row.depth, row.children) for row in trace.rows] == [
        ("a", 0, 2),
        ("b", 1, 1),
        ("d", 2, 0),
        ("c", 1, 0),
    ]
    # A child may outlive its parent.
    assert trace.nanoseconds == 10 * MILLISECOND
    assert [(round(row.begins, 6), round(row.takes, 6)) for row in trace.rows] == [
        (0, 0.6),
        (0.1, 0.2),
        (0.2, 0.8),
        (0.5, 0.2),
    ]
    assert trace.services == ["sandbox", "pool"]


def test_a_span_whose_parent_is_not_here_is_a_root() -> None:
    trace = lay_out([span("b", "caller", at=1), span("a", at=0), span("c", "b", at=2)])
    assert [(row.span.span_id, row.depth, row.elsewhere) for row in trace.rows] == [
        ("a", 0, False),
        ("b", 0, True),
        ("c", 1, False),
    ]


def test_a_moment_and_a_long_chain_can_be_laid_out() -> None:
    (row,) = lay_out([span("a", took=0)]).rows
    assert (row.begins, row.takes) == (0, 0)
    chain = [span(str(number), str(number - 1) if number else "", at=number) for number in range(5000)]
    assert [row.depth for row in lay_out(chain[::-1]).rows] == list(range(5000))


def test_executions_and_errors_are_counted() -> None:
    trace = lay_out(
        [
            span("a", name="turn", attributes={"hearth.execution": "e1"}, error="TURN_LIMIT"),
            span("b", "a", attributes={"hearth.execution": "not of a turn"}),
        ]
    )
    assert (trace.executions, trace.errors) == (["e1"], 1)


@pytest.mark.parametrize(
    ("nanoseconds", "words"),
    [
        (0, "0 µs"),
        (1_499, "1 µs"),
        (999_499, "999 µs"),
        (999_500, "1.0 ms"),
        (12_345_678, "12.3 ms"),
        (99_950_000, "100 ms"),
        (999_499_999, "999 ms"),
        (999_500_000, "1.00 s"),
        (59_990_000_000, "59.99 s"),
        (60_000_000_000, "1 min 0 s"),
        (7_265_000_000_000, "121 min 5 s"),
    ],
)
def test_durations(nanoseconds: int, words: str) -> None:
    assert duration(nanoseconds) == words


@pytest.mark.parametrize("nanoseconds", [1, 7, 999, 12_345_678, 3_600_000_000_000])
def test_ticks_are_few_and_round(nanoseconds: int) -> None:
    found = list(ticks(nanoseconds))
    assert found[0] == 0
    assert 1 <= len(found) <= 9
    assert found[-1] <= nanoseconds
    if len(found) > 1:
        assert str(found[1]).rstrip("0") in ("1", "2", "5")
        assert nanoseconds - found[-1] < found[1]
