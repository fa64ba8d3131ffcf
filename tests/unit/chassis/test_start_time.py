"""What a service does not use it does not load: every start would take longer."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("service", "without"), [("history", "aiohttp"), ("pool", "redis")])
def test_a_service_loads_no_client_that_it_does_not_use(service: str, without: str) -> None:
    program = f"import sys, services.{service}.__main__; sys.exit({without!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
