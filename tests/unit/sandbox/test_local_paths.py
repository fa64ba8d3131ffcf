"""The local provider: no session climbs out of the workspaces or shares one, and what it cannot do it refuses."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.chassis.clock import SystemClock
from services.sandbox.compatibility import Spec
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.local_state import State
from services.sandbox.providers.port import ProviderRefused
from services.sandbox.rows import NAME_PREFIX, Key

ids = st.text("abAB01_-.:", min_size=1, max_size=8)


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path, SystemClock())


@given(ids, ids, ids, ids)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_session_has_its_own_directory_two_levels_below_the_workspaces(
    provider: LocalProvider, project: str, session: str, other_project: str, other_session: str
) -> None:
    key, other = Key(project, session), Key(other_project, other_session)
    path = Path(provider.workspace(key))
    assert path.parent.parent.name == "workspaces"
    assert path.name not in (".", "..")
    assert path.parent.name not in (".", "..")
    assert ":" not in str(path)
    assert (provider.workspace(other) == str(path)) == (other == key)


SPEC = Spec(provider="local", agent="scripted")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image": "x"}, "image"),
        ({"snapshot": "x"}, "snapshot"),
        ({"target": "eu"}, "target"),
        ({"cpus": 1}, "resources"),
        ({"network": "BLOCKED"}, "network"),
        ({"network": "ALLOW_LIST"}, "network"),
    ],
)
def test_what_it_cannot_keep_is_refused_by_name(provider: LocalProvider, change: dict[str, object], field: str) -> None:
    with pytest.raises(ProviderRefused) as refusal:
        provider.check(replace(SPEC, **change))  # type: ignore[arg-type]
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("::1", "http://[::1]:7"),
        ("0.0.0.0", f"http://{socket.gethostname()}:7"),
    ],
)
async def test_pools_are_told_where_its_daemons_are(tmp_path: Path, host: str, url: str) -> None:
    provider = LocalProvider(tmp_path, SystemClock(), host=host)
    directory = tmp_path / f"{NAME_PREFIX}1"
    directory.mkdir()
    State({}, "p", "s", created=0.0, port=7).write(directory)
    assert (await provider.endpoint(directory.name)).url == url


def test_an_open_network_is_what_it_has(provider: LocalProvider) -> None:
    provider.check(replace(SPEC, network="OPEN"))
