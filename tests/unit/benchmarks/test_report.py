"""Reports: medians and percentiles, targets, the JSON object, exit codes, and when a part is measured again."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import latency, medians, per_item, percentile, rounded
from benchmarks.report import Report, Target, least, most
from benchmarks.runs import Options, Part, collect, once, undisturbed


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_figures_have_their_units() -> None:
    assert latency("x_", [0.001, 0.002, 0.1]) == {"x_p50_ms": 2.0, "x_p99_ms": 100.0}
    assert per_item("x_", {"relay": 0.5}, 1000) == {"x_relay_us": pytest.approx(500)}


def test_median_of_the_runs_that_have_a_figure() -> None:
    assert medians([{"a": 1, "b": 5}, {"a": 9}, {"a": 2}]) == {"a": 2, "b": 5}


def test_numbers_are_short() -> None:
    assert rounded(12345.678) == 12346
    assert rounded(0.0123456) == 0.01235
    assert rounded(-3.14159) == -3.142
    assert rounded(0.0) == 0


def test_a_target_has_a_side() -> None:
    assert least({"rate": 10}, "rate", 10, "events/s").ok
    assert not least({"rate": 9.9}, "rate", 10, "events/s").ok
    assert most({"p99": 10}, "p99", 10, "ms").ok
    assert not most({"p99": 10.1}, "p99", 10, "ms").ok
    assert not most({}, "p99", 10, "ms").ok
    assert not least({}, "p99", 10, "ms").ok


def report(**fields: object) -> Report:
    found = Report("append", {"callers": 2}, figures={"rate": 12.5}, targets=[Target("rate", 12.5, 10, "events/s")])
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_exit_codes() -> None:
    assert report().exit_code == 0
    assert report(targets=[Target("rate", 9, 10, "events/s")]).exit_code == 1
    assert report(others_cores=0.31).exit_code == 2
    assert report(others_cores=0.31, targets=[Target("rate", 9, 10, "events/s")]).exit_code == 2
    assert report(others_cores=0.31, problems=["a text is wrong"]).exit_code == 1
    assert report(problems=["a text is wrong"]).exit_code == 1


def test_the_json_object() -> None:
    content = json.loads(json.dumps(report(peers=[{"peer": "nats", "events_per_s": 1}]).content()))
    assert list(content) == ["workload", "params", "figures", "others_cores", "targets", "peers"]
    assert content["figures"] == {"rate": 12.5}
    assert content["targets"][0] == {"name": "rate", "value": 12.5, "target": 10, "unit": "events/s", "ok": True}
    assert content["targets"][-1]["name"] == "wrong_results"
    assert content["targets"][-1]["ok"] is True
    assert content["peers"] == [{"peer": "nats", "events_per_s": 1}]


def test_a_wrong_result_is_told() -> None:
    content = report(problems=["a text is wrong"]).content()
    assert content["figures"]["problems"] == ["a text is wrong"]
    assert content["targets"][-1] == {
        "name": "wrong_results",
        "value": 1,
        "target": 0,
        "unit": "results",
        "ok": False,
    }


def test_a_missing_figure_is_valid_json() -> None:
    content = report(targets=[most({}, "p99", 10, "ms")]).content()
    assert content["targets"][0] == {"name": "p99", "value": None, "target": 10, "unit": "ms", "ok": False}


def test_tables_for_people() -> None:
    tables = report(peers=[{"peer": "nats", "workload": "fanout", "events_per_s": 1, "params": {}}]).tables()
    assert [table.row_count for table in tables] == [2, 1, 1]


class Measuring:
    """Gives the parts it was made with, one for each call."""

    def __init__(self, *parts: Part) -> None:
        self.left = list(parts)

    async def __call__(self) -> Part:
        return self.left.pop(0)


async def test_a_quiet_part_counts_at_once() -> None:
    measure = Measuring(Part({"a": 1}, 0.1), Part({"a": 2}, 0.0))
    assert (await undisturbed(measure, Options(), print)).figures == {"a": 1}


async def test_a_disturbed_part_is_measured_again() -> None:
    measure = Measuring(Part({"a": 1}, 0.9), Part({"a": 2}, 0.2), Part({"a": 3}, 0.0))
    assert (await undisturbed(measure, Options(), print)).figures == {"a": 2}


async def test_the_least_disturbed_of_a_few() -> None:
    measure = Measuring(Part({"a": 1}, 0.9), Part({"a": 2}, 0.5), Part({"a": 3}, 0.7))
    assert (await undisturbed(measure, Options(), print)).others_cores == 0.5


async def test_a_problem_is_not_measured_away() -> None:
    measure = Measuring(Part({"a": 1}, 0.9, ["wrong"]), Part({"a": 2}, 0.0))
    found = await undisturbed(measure, Options(), print)
    assert found.problems == ["wrong"]
    assert measure.left


async def test_runs_come_together() -> None:
    made = report(figures={}, targets=[])
    parts = {
        "one": Measuring(Part({"a": 4}, 0.1), Part({"a": 8}, 0.3), Part({"a": 6}, 0.0, ["late"])),
        "two": Measuring(*(Part({"b": 2}, 0.0) for _ in range(3))),
    }
    await collect(made, parts, Options(runs=3), print, derive=lambda run: {"ratio": run["a"] / run["b"]})
    await once(made, "rest", Measuring(Part({"c": 5}, 1.9, ["odd"])), print)
    assert made.figures == {"a": 6, "b": 2, "ratio": 3, "c": 5}
    assert made.others_cores == 0.3
    assert made.problems == ["late", "odd"]
    assert [run["ratio"] for run in made.content()["figures"]["runs"]] == [2, 4, 3]


async def test_a_quick_run_is_not_repeated() -> None:
    made = report(figures={}, targets=[])
    measure = Measuring(Part({"a": 4}, 1.5), Part({"a": 5}, 0.0))
    await collect(made, {"one": measure}, Options(runs=1, quick=True), print)
    assert made.void
    assert measure.left
