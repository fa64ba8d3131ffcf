"""What a spec binds, what may be given, and when an agent cannot go on with what it was given."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from hearth.secret import Secret
from hearth.session.v1 import session_pb2 as sessions
from services.pool.credentials import NOTHING, Binding, Credential, Given, Stale, bindings, covers, refusal, stale
from services.pool.harness.port import McpServer
from services.pool.turns.preparing import mcp_servers

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIMIT = 7200.0
SECRET = "sk-very-secret"


def bind(credential: str, target: str) -> sessions.CredentialBinding:
    return sessions.CredentialBinding(credential=credential, target=target)


SPEC = sessions.SessionSpec(
    credentials=[bind("model", "MODEL_KEY")],
    mcp_servers=[
        sessions.McpServer(name="none"),
        sessions.McpServer(
            name="files", stdio=sessions.McpStdio(command=["files"], env={"A": "1"}, credentials=[bind("disk", "B")])
        ),
        sessions.McpServer(
            name="web",
            http=sessions.McpHttp(url="https://x", headers={"X-A": "1"}, credentials=[bind("web", "Authorization")]),
        ),
    ],
)


def given(value: str = SECRET, *, generation: int = 1, ends: datetime | None = None, target: str = "KEY") -> Given:
    return Given.of([(Binding("spec.credentials[0]", "model", target), generation, Secret(value), ends)])


def test_every_binding_is_found_with_its_field() -> None:
    assert [(one.field, one.credential, one.target, one.server) for one in bindings(SPEC)] == [
        ("spec.credentials[0]", "model", "MODEL_KEY", ""),
        ("spec.mcp_servers[1].stdio.credentials[0]", "disk", "B", "files"),
        ("spec.mcp_servers[2].http.credentials[0]", "web", "Authorization", "web"),
    ]


def test_each_value_goes_to_its_place_only() -> None:
    found = Given.of(
        (one, number, Secret(f"value of {one.credential}"), None) for number, one in enumerate(bindings(SPEC))
    )
    (slot,) = found.slots()
    assert (slot.env_name, slot.value, slot.generation) == ("MODEL_KEY", "value of model", 0)
    assert mcp_servers(sessions.SessionSpec(mcp_servers=SPEC.mcp_servers[1:]), found) == [
        McpServer("files", command=["files"], values={"A": Secret("1"), "B": Secret("value of disk")}),
        McpServer("web", url="https://x", values={"X-A": Secret("1"), "Authorization": Secret("value of web")}),
    ]


def test_what_is_missing_or_has_expired_is_named() -> None:
    wanted = bindings(SPEC)
    known: dict[str, datetime | None] = {"model": None, "disk": NOW + timedelta(seconds=1), "web": None}
    assert refusal(wanted, known, NOW) is None
    expired = refusal(wanted, {**known, "disk": NOW}, NOW)
    assert expired is not None
    assert (expired.reason, expired.metadata) == ("CREDENTIAL_EXPIRED", {"credential": "disk"})
    del known["web"]
    missing = refusal(wanted, known, NOW)
    assert missing is not None
    assert (missing.reason, missing.metadata) == ("CREDENTIAL_NOT_FOUND", {"credential": "web"})
    assert missing.field_violations[0][0] == "spec.mcp_servers[2].http.credentials[0].credential"


def test_w_c10_the_same_values_in_the_same_places_are_the_same() -> None:
    assert given().same_as(given(ends=NOW))
    assert NOTHING.same_as(Given())
    for other in (given("other"), given(generation=2), given(target="OTHER"), NOTHING):
        assert not given().same_as(other)
        assert not other.same_as(given())


@pytest.mark.parametrize(
    "show",
    [repr, str, lambda found: f"{found}", lambda found: f"{found!r:>40}"],
    ids=["repr", "str", "format", "format-repr"],
)
def test_w_c10_no_text_of_it_has_a_value(show: Callable[[Given], str]) -> None:
    assert SECRET not in show(given())
    assert SECRET not in show([given(), {"a": given()}])  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [pickle.dumps, copy.copy, copy.deepcopy])
def test_w_c10_it_is_not_written_down(write: Callable[[Given], object]) -> None:
    with pytest.raises(TypeError):
        write(given())


def test_a_row_shows_no_bytes() -> None:
    assert "sealed" not in repr(Credential("a", 1, 1, b"sealed", None, NOW))


def test_w_c11_a_lease_covers_the_turn_and_a_minute() -> None:
    horizon = NOW + timedelta(seconds=LIMIT + 60)
    assert covers(None, NOW, LIMIT)
    assert not covers(horizon, NOW, LIMIT)
    assert covers(horizon + timedelta(milliseconds=1), NOW, LIMIT)


def test_w_c11_expired_goes_before_rotated_and_rotated_before_expiring() -> None:
    soon, past = NOW + timedelta(seconds=5), NOW
    assert stale(given(ends=past), given("other"), NOW, LIMIT) is Stale.EXPIRED
    assert stale(given(ends=soon), given("other", ends=soon), NOW, LIMIT) is Stale.ROTATED
    assert stale(given(ends=soon), given(ends=soon), NOW, LIMIT) is Stale.EXPIRING
    assert stale(given(), given(), NOW, LIMIT) is None
    assert stale(NOTHING, NOTHING, NOW, LIMIT) is None


def test_w_d14_the_end_is_the_earliest_of_what_was_installed() -> None:
    first, second = NOW + timedelta(hours=1), NOW + timedelta(hours=9)
    one, two = Binding("a", "a", "A"), Binding("b", "b", "B")
    found = Given.of([(one, 1, Secret("x"), second), (two, 1, Secret("y"), first), (one, 1, Secret("z"), None)])
    assert found.lease == first
    # Other values were asked for meanwhile: what is installed still ends when it ends.
    assert (
        stale(Given.of([(one, 1, Secret("x"), NOW)]), Given.of([(one, 2, Secret("y"), second)]), NOW, LIMIT)
        is Stale.EXPIRED
    )


def test_a_longer_life_of_the_same_value_keeps_the_agent() -> None:
    soon, later = NOW + timedelta(seconds=5), NOW + timedelta(hours=9)
    assert stale(given(ends=soon), given(ends=later), NOW, LIMIT) is None
