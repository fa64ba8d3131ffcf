"""Instruments of metrics: what the library gets of counts and readings, and what a reading that fails leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import metrics as api
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry

from services.chassis import metrics
from services.chassis.errors import Unavailable
from services.chassis.metrics import Count, Family, Kind, Readings, Sizes


class Page:
    """What Prometheus would read of instruments that are made while it is there."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._reader = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        self.provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def value(self, series: str) -> float | None:
        name, _, labels = series.partition("{")
        pairs = [pair.split("=") for pair in labels.rstrip("}").split(",") if pair]
        return self._registry.get_sample_value(name, dict(pairs))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    found = Page()
    monkeypatch.setattr(api, "get_meter", found.provider.get_meter)
    yield found
    found.provider.shutdown()


def family(kind: Kind, unit: str = "{thing}", **labels: tuple[str, ...]) -> Family:
    return Family("hearth.test.things", kind, unit, "things", labels, bounds=(1.0, 10.0))


def test_a_counter_begins_at_zero_where_its_labels_are_known(page: Page) -> None:
    things = Count(family(Kind.COUNTER, how=("warm", "cold")))
    assert page.value("hearth_test_things_total{how=warm}") == 0
    things.add(2, "warm")
    things.add(1, "odd")
    assert page.value("hearth_test_things_total{how=warm}") == 2
    assert page.value("hearth_test_things_total{how=cold}") == 0
    assert page.value("hearth_test_things_total{how=odd}") == 1
    assert things["odd",] == 1


def test_a_counter_without_labels_begins_at_zero_and_one_with_unknown_ones_is_empty(page: Page) -> None:
    Count(family(Kind.COUNTER))
    assert page.value("hearth_test_things_total") == 0
    assert list(family(Kind.COUNTER, code=()).known) == []


def test_a_histogram_has_its_own_bounds(page: Page) -> None:
    things = Sizes(family(Kind.HISTOGRAM, "s", how=()))
    for size in (0.5, 5.0, 50.0):
        things.record(size, "warm")
    assert page.value("hearth_test_things_seconds_bucket{how=warm,le=1.0}") == 1
    assert page.value("hearth_test_things_seconds_bucket{how=warm,le=10.0}") == 2
    assert page.value("hearth_test_things_seconds_count{how=warm}") == 3


async def test_what_is_looked_up_is_shown_and_gone_when_it_cannot_be(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_FRESH_SECONDS", 0.0)
    one, away = family(Kind.GAUGE, state=("busy", "idle")), asyncio.Event()

    async def look() -> metrics.Reading:
        if away.is_set():
            raise Unavailable("Postgres does not answer", reason="DEPENDENCY_UNAVAILABLE")
        return {one: {"busy": 3}}

    readings = Readings()
    readings.watch(look, one)
    await readings.refresh()
    assert page.value("hearth_test_things{state=busy}") == 3
    assert page.value("hearth_test_things{state=idle}") == 0
    away.set()
    await readings.refresh()
    assert page.value("hearth_test_things{state=busy}") is None
    assert page.value("hearth_metrics_reading_failures_total") == 1


async def test_one_that_takes_too_long_keeps_nobody_else(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_READ_SECONDS", 0.05)
    slow = family(Kind.GAUGE)
    quick = Family("hearth.test.quick", Kind.GAUGE, "1", "quick", {})

    async def hang() -> metrics.Reading:
        await asyncio.Event().wait()
        return {}

    readings = Readings()
    readings.watch(hang, slow)
    readings.watch_number(quick, lambda: 7)
    await readings.refresh()
    assert page.value("hearth_test_things") is None
    assert page.value("hearth_test_quick") == 7


async def test_who_asks_at_the_same_time_is_told_the_same(page: Page) -> None:
    asked = 0

    def look() -> float:
        nonlocal asked
        asked += 1
        return asked

    readings = Readings()
    readings.watch_number(family(Kind.GAUGE), look)
    await asyncio.gather(*(readings.refresh() for _ in range(5)))
    assert asked == 1


def test_two_metrics_of_one_name_are_a_defect() -> None:
    with pytest.raises(ValueError, match=r"hearth\.dependency\.up"):
        metrics.gauge("hearth.dependency.up", "1", "again")
