"""Where the suite of history and relay runs: against the services that HEARTH_TEST_TARGET names, else against ours."""

from __future__ import annotations

import uuid

import pytest

from tests.conftest import GIVEN
from tests.support import events
from tests.support.targets import Target


@pytest.fixture(scope="session")
def given_target() -> Target | None:
    """The services that somebody named; None: start some. All sessions of the run are in a project of its own."""
    target = Target.given(GIVEN)
    if target is not None:
        events.use_project(f"conformance-{uuid.uuid4().hex[:8]}")
    return target


def pytest_report_header() -> str:
    """Says against what the suite runs."""
    target = Target.given(GIVEN)
    return f"history and relay under test: {target or 'ours, two replicas of each'}"
