"""The table of docs/agents.md: what each agent was seen to do by the last `make agents`.

`python -m scripts.agents --results FILE` takes a JUnit report of `tests/agents` into `tests/agents/seen.json` and
writes the table anew; agents that it does not tell of stay as they were. Where a test failed it exits with 1 and
changes nothing. `--check` compares the page with the data and exits with 1 when it is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "agents.md"
DATA = ROOT / "tests" / "agents" / "seen.json"
BEGIN = "<!-- agents: from here on written by `make agents` -->\n"

HEAD = """
## What was seen

By the last `make agents`, behind [agentd](agentd.md) and behind sandbox-agent 0.4.2. Where two things are told, the
first is what was seen behind agentd. Times are those of whole turns whose model answers at once, on two shared
cores.
"""

AGENTS = {"codex": "Codex", "claude": "Claude Code", "pi": "Pi", "opencode": "OpenCode"}
DAEMONS = ("agentd", "sandbox-agent")
FILES = {
    "test_six_steps": "The six steps",
    "test_ends": "How they end",
    "test_media_and_models_gone_wrong": "What reaches the model, and what a failing one does",
}
YES = "yes"

_NAME = re.compile(rf"(\w+)\[({'|'.join(DAEMONS)})-({'|'.join(AGENTS)})\]")

# Agent → test, as `test_six_steps.test_1_a_prompt_is_answered` → daemon → what was seen.
Seen = dict[str, dict[str, dict[str, str]]]


def read(report: ET.Element) -> Seen:
    """What a JUnit report says. Raises ValueError when a test failed, or did not run and was not expected to fail."""
    found: Seen = {}
    wrong = []
    for case in report.iter("testcase"):
        match = _NAME.fullmatch(case.get("name", ""))
        if match is None:
            continue
        test, daemon, agent = match.groups()
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            wrong.append(f"{case.get('name')} failed")
            continue
        if skipped is not None and skipped.get("type") != "pytest.xfail":
            wrong.append(f"{case.get('name')} did not run: {skipped.get('message')}")
            continue
        words = f"no: {skipped.get('message')}" if skipped is not None else _words(case)
        file = case.get("classname", "").rpartition(".")[2]
        found.setdefault(agent, {}).setdefault(f"{file}.{test}", {})[daemon] = words
    if wrong or not found:
        raise ValueError("\n".join(wrong) or "the report tells of no agent")
    return found


def render(seen: Seen, page: str) -> str:
    """The page with its table made anew. Raises ValueError when the page has no place for it."""
    by_hand, begin, _ = page.partition(BEGIN)
    if not begin:
        raise ValueError(f"the page has no line {BEGIN.strip()}")
    agents = [agent for agent in AGENTS if agent in seen]
    # Not in the order in which a run came to them: that is not kept with the data.
    tests = sorted({test for agent in agents for test in seen[agent]})
    parts = [by_hand, begin, HEAD]
    for file, title in FILES.items():
        rows = [test for test in tests if test.partition(".")[0] == file]
        if rows:
            parts.append(f"\n### {title}\n\n| | {' | '.join(AGENTS[agent] for agent in agents)} |\n")
            parts.append(f"|{'---|' * (len(agents) + 1)}\n")
            parts += [f"| {_row(test)} | {' | '.join(_cells(test, agents, seen))} |\n" for test in rows]
    return "".join(parts)


def _row(test: str) -> str:
    """`test_six_steps.test_1_a_prompt_is_answered` in words, with a link."""
    file, _, name = test.partition(".")
    words = name.removeprefix("test_").replace("_", " ")
    return f"[{words[:1].upper()}{words[1:]}](../tests/agents/{file}.py)"


def _cells(test: str, agents: Iterable[str], seen: Seen) -> Iterable[str]:
    for agent in agents:
        found = seen[agent].get(test, {})
        words = list(dict.fromkeys(found.get(daemon, "not run") for daemon in DAEMONS))
        yield " / ".join(words)


def _words(case: ET.Element) -> str:
    told = [found.get("value", "") for found in case.iter("property") if found.get("name") == "seen"]
    return told[-1] if told else YES


def load() -> Seen:
    """What was seen by the runs so far."""
    found: Seen = json.loads(DATA.read_text()) if DATA.exists() else {}
    return found


def _dump(seen: Mapping[str, object]) -> str:
    return json.dumps(seen, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Take a report, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="JUnit XML of a run of tests/agents")
    parser.add_argument("--check", action="store_true", help="compare the page only")
    arguments = parser.parse_args()
    seen = load()
    if arguments.check:
        if PAGE.read_text() != render(seen, PAGE.read_text()):
            raise SystemExit("docs/agents.md is out of date; run python -m scripts.agents")
        return
    if arguments.results is not None:
        try:
            # Written by our own run of pytest.
            seen |= read(ET.parse(arguments.results).getroot())  # noqa: S314
        except ValueError as error:
            raise SystemExit(str(error)) from None
    page = render(seen, PAGE.read_text())
    DATA.write_text(_dump(seen))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
