"""The page of metrics of a service, as Prometheus reads it."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


class Page:
    """What was read."""

    def __init__(self, text: str) -> None:
        self._families = list(text_string_to_metric_families(text))

    @property
    def series(self) -> set[str]:
        """Names of all series."""
        return {sample.name for family in self._families for sample in family.samples}

    def value(self, series: str, **labels: str) -> float:
        """The sum of all series of that name with these labels; 0 without any."""
        return sum(self.values(series, **labels))

    def values(self, series: str, **labels: str) -> list[float]:
        """Those of all series of that name with these labels."""
        return [
            sample.value
            for family in self._families
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]


async def read(address: str) -> Page:
    """The page at host:port."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
        assert answer.status == 200
        return Page(await answer.text())
