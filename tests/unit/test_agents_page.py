"""The table of docs/agents.md: up to date, and made of what a run of the tests said and of nothing else."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from scripts import agents
from tests.agents.roster import FIRST

PAGE = f"# Agents\n\nBy hand.\n\n{agents.BEGIN}stale\n"


def case(name: str, *inside: str) -> str:
    """A test in a JUnit report."""
    return f'<testcase classname="tests.agents.test_six_steps" name="{name}">{"".join(inside)}</testcase>'


def seen_in(*cases: str) -> agents.Seen:
    """What a report of these tests says."""
    return agents.read(ET.fromstring(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"))


def said(words: str) -> str:
    """What a test noted."""
    return f'<properties><property name="seen" value="{words}"/></properties>'


def test_the_page_is_what_was_seen_last() -> None:
    page = agents.PAGE.read_text()
    assert agents.render(agents.load(), page) == page
    assert set(agents.load()) == set(agents.AGENTS)
    assert FIRST in agents.AGENTS


def test_a_row_tells_of_each_agent_behind_both_daemons() -> None:
    seen = seen_in(
        case("test_1_it_runs[agentd-codex]", said("1.0 s")),
        case("test_1_it_runs[sandbox-agent-codex]", said("2.0 s")),
        case("test_1_it_runs[agentd-pi]"),
        case("test_1_it_runs[sandbox-agent-pi]"),
        case("test_2_it_asks[agentd-codex]"),
        case("test_2_it_asks[sandbox-agent-codex]", '<skipped type="pytest.xfail" message="it does not"/>'),
        case("test_of_something_else"),
    )
    page = agents.render(seen, PAGE)
    assert page.startswith("# Agents\n\nBy hand.\n")
    assert "stale" not in page
    assert "| [1 it runs](../tests/agents/test_six_steps.py) | 1.0 s / 2.0 s | yes |" in page
    assert "| [2 it asks](../tests/agents/test_six_steps.py) | yes / no: it does not | not run |" in page


def test_the_order_in_which_tests_ran_makes_no_other_page() -> None:
    cases = [case(f"test_{number}_it_runs[{daemon}-codex]") for number in (2, 1) for daemon in agents.DAEMONS]
    assert agents.render(seen_in(*cases), PAGE) == agents.render(seen_in(*reversed(cases)), PAGE)


@pytest.mark.parametrize(
    "inside", ["<failure/>", "<error/>", '<skipped type="pytest.skip" message="npm is not installed"/>']
)
def test_a_test_that_failed_or_did_not_run_is_no_result(inside: str) -> None:
    with pytest.raises(ValueError, match=r"test_1_it_runs\[agentd-codex\]"):
        seen_in(case("test_1_it_runs[agentd-codex]", inside))


def test_a_report_of_no_agent_and_a_page_without_place_are_refused() -> None:
    with pytest.raises(ValueError, match="no agent"):
        seen_in(case("test_of_something_else"))
    with pytest.raises(ValueError, match="no line"):
        agents.render({}, "# Agents\n")
