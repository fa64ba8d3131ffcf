"""What a stopped turn left running: found by age and by whose child it is, and never the agent itself."""

from __future__ import annotations

import pytest

from services.pool.turns.leftovers import leftovers, parse

# 100 is the daemon, 110 the agent, 111 its server, 120 a tool's child, 121 that one's, 130 adopted by the daemon.
TEXT = """150 100
    1     0 90000 Ss
    2     0 90000 S
  100     1   500 Sl
  110   100   400 Sl
  111   110   399 S
  120   110     3 S
  121   120     3 S
  130   100     2 S
  131   110     1 Z
  150   100     0 R
  160     1     2 S
  170     2     1 I
"""
KNOWN = frozenset({110, 111})


def test_the_listing_leaves_itself_out() -> None:
    listing = parse(TEXT)
    assert listing.daemon == 100
    assert 150 not in {process.pid for process in listing.processes}
    assert {process.pid for process in listing.below_daemon()} == {110, 111, 120, 121, 130, 131}


def test_young_descendants_that_are_not_the_agents_own() -> None:
    assert sorted(leftovers(parse(TEXT), KNOWN, 4.0, isolated=False)) == [120, 121, 130]
    # Started before the prompt: an earlier turn's, meant to stay.
    assert sorted(leftovers(parse(TEXT), KNOWN, 0.5, isolated=False)) == [130]


def test_in_a_sandbox_of_its_own_orphans_count_too() -> None:
    assert sorted(leftovers(parse(TEXT), KNOWN, 4.0, isolated=True)) == [120, 121, 130, 160]


def test_a_young_agent_is_known_by_its_pid() -> None:
    young = TEXT.replace("110   100   400", "110   100     1").replace("111   110   399", "111   110     1")
    assert sorted(leftovers(parse(young), KNOWN, 4.0, isolated=False)) == [120, 121, 130]


@pytest.mark.parametrize("text", ["", "x", "1 2\nabc", "1 2\n1 2 3"])
def test_what_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)
