"""The alert rules and what they are about: each expression parses and asks for what services tell; each has a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import promql_parser
import pytest
from ruamel.yaml import YAML

from services.chassis.metrics import Family, catalogue
from services.history import metrics as _history  # noqa: F401 - to be in the catalogue
from services.pool import metrics as _pool  # noqa: F401
from services.relay import metrics as _relay  # noqa: F401
from services.sandbox import metrics as _sandbox  # noqa: F401

DIRECTORY = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
# What Prometheus itself and the library of the process tell.
FOREIGN = {"up", "process_open_fds", "process_max_fds"}
TARGET = {"job", "instance"}
# The case of an expression that is no rule.
COST_CASE = "what a day costs, over a rollout"


def loaded(name: str) -> Any:
    return YAML(typ="safe").load((DIRECTORY / name).read_text())


RULES = [rule for group in loaded("hearth.rules.yml")["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
SERIES: dict[str, Family] = {series: family for family in catalogue() for series in family.series}


def selectors(expression: str) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def label_names(family: Family) -> set[str]:
    return {label.replace(".", "_") for label in family.labels} | {"le"} | TARGET


def check(expression: str) -> None:
    asked = selectors(expression)
    assert asked, expression
    for selector in asked:
        if selector.name in FOREIGN:
            continue
        assert selector.name in SERIES, f"no service tells {selector.name}"
        family = SERIES[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in label_names(family), f"{selector.name} has no label {matcher.name}"
            known = family.labels.get(matcher.name, ())
            if matcher.op == promql_parser.MatchOp.Equal and known:
                assert matcher.value in known, f"{selector.name} never has {matcher.name}={matcher.value}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_services_tell(rule: dict[str, Any]) -> None:
    check(rule["expr"])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_how_bad(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = loaded("hearth.rules.test.yml")["tests"]
    names = ["nothing while all is well", *(rule["alert"] for rule in ALERTS), COST_CASE]
    assert [case["name"] for case in cases] == names
    for case in cases:
        for series in case["input_series"]:
            name = series["series"].partition("{")[0]
            assert name in SERIES or name in FOREIGN, f"no service tells {name}"


def test_the_page_asks_for_the_cost_as_its_case_does() -> None:
    (case,) = (case for case in loaded("hearth.rules.test.yml")["tests"] if case["name"] == COST_CASE)
    (asked,) = (test["expr"] for test in case["promql_expr_test"])
    page = (DIRECTORY.parents[1] / "docs" / "metrics.md").read_text()
    assert asked.strip() in " ".join(page.split())
    check(asked)


def test_the_check_sees_what_is_wrong() -> None:
    for wrong in (
        "hearth_pool_turn_total > 0",
        'hearth_pool_turns_total{outcom="failed"} > 0',
        'hearth_pool_turns_total{outcome="fialed"} > 0',
        "rate(hearth_history_commit_duration_seconds[5m]) > 0",
    ):
        with pytest.raises(AssertionError):
            check(wrong)
    with pytest.raises(ValueError):
        check("sum(hearth_pool_turns_total > 0")


def test_names_follow_the_conventions() -> None:
    for family in catalogue():
        assert family.exposed.startswith(("hearth_", "rpc_"))
        assert not set(family.labels) & {"project", "session", "execution", "sandbox_id", "holder"}
        assert family.help == family.help.strip() != ""
