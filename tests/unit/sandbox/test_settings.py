"""Settings: what is wrong is named, off switches switch off, the built-in agent stays."""

from __future__ import annotations

import json
import sys

import pytest
from pydantic import ValidationError

from hearth.secret import revealed
from services.chassis.settings import problems
from services.sandbox.settings import SandboxSettings


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HEARTH_POSTGRES_DSN", "postgresql://nobody@127.0.0.1/none")
    return monkeypatch


def wrong() -> str:
    """What a start would print."""
    with pytest.raises(ValidationError) as caught:
        SandboxSettings()  # type: ignore[call-arg]
    return "\n".join(problems(SandboxSettings, caught.value))


def read() -> SandboxSettings:
    return SandboxSettings()  # type: ignore[call-arg]


def test_w_c01_defaults(given: pytest.MonkeyPatch) -> None:
    settings = read()
    tier = settings.tiers()["local"]
    assert (tier.window, tier.cap, tier.park_stopped) == (60, 8, True)
    assert settings.daytona_warm_window == 120
    assert settings.daytona_warm_cap == 20
    assert settings.default_provider == "local"
    assert (settings.lease, settings.lease_read_interval, settings.lease_gap) == (90, 5, 10)
    assert settings.agent_commands()["scripted"].command == (sys.executable, "-P", "-m", "hearth.agents.scripted")


def test_w_c01_zero_is_off_and_not_the_default(given: pytest.MonkeyPatch) -> None:
    given.setenv("HEARTH_LOCAL_WARM_WINDOW", "0")
    given.setenv("HEARTH_LOCAL_PARK_STOPPED", "off")
    tier = read().tiers()["local"]
    assert not tier.park_running
    assert not tier.park_stopped


def test_agents_are_added_to_the_built_in_one(given: pytest.MonkeyPatch) -> None:
    given.setenv("WANTED", "value")
    given.setenv(
        "HEARTH_AGENTS",
        '{"codex": {"command": ["codex-acp"], "env": ["WANTED", "NOT_SET"], "state_paths": [".codex/sessions"]},'
        ' "other": {"command": ["x"], "env": {"A": "1"}}}',
    )
    agents = read().agent_commands()
    assert set(agents) == {"scripted", "codex", "other"}
    assert revealed(agents["codex"].env) == {"WANTED": "value"}
    assert agents["codex"].state_paths == (".codex/sessions",)
    assert revealed(agents["other"].env) == {"A": "1"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": {}}', "agent 'a': command"),
        ('{"a": {"command": []}}', "agent 'a': command"),
        ('{"a": {"command": ["x"], "enviroment": {}}}', "agent 'a': enviroment"),
        ('{"a/b": {"command": ["x"]}}', "'a/b'"),
    ],
)
def test_a_wrong_agent_is_named(given: pytest.MonkeyPatch, value: str, said: str) -> None:
    given.setenv("HEARTH_AGENTS", value)
    text = wrong()
    assert "HEARTH_AGENTS" in text
    assert said in text


def test_w_c03_providers_must_exist_and_hold_the_default(given: pytest.MonkeyPatch) -> None:
    given.setenv("HEARTH_PROVIDERS", "local,moon")
    assert "HEARTH_PROVIDERS" in wrong()
    given.setenv("HEARTH_PROVIDERS", "local")
    given.setenv("HEARTH_DEFAULT_PROVIDER", "daytona")
    assert "HEARTH_DEFAULT_PROVIDER=daytona" in wrong()


def test_a_watcher_that_could_never_see_a_lapse_is_refused(given: pytest.MonkeyPatch) -> None:
    given.setenv("HEARTH_LEASE_READ_INTERVAL", "10")
    assert "HEARTH_LEASE_GAP" in wrong()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_state_and_logins_of_an_agent_lie_below_its_home(given: pytest.MonkeyPatch, path: str) -> None:
    for field in ("state_paths", "auth_paths"):
        given.setenv("HEARTH_AGENTS", json.dumps({"a": {"command": ["x"], field: [path]}}))
        assert f"agent 'a': {field}" in wrong()


def test_logins_of_known_agents_are_known_and_others_are_added(given: pytest.MonkeyPatch) -> None:
    given.setenv("HEARTH_AGENTS", '{"a": {"command": ["x"], "auth_paths": [".a/key"]}}')
    paths = read().agent_commands()["a"].auth_paths
    assert ".codex/auth.json" in paths
    assert paths[-1] == ".a/key"


@pytest.mark.parametrize("value", ["-1", "many"])
@pytest.mark.parametrize("name", ["LOCAL_WARM_WINDOW", "LOCAL_WARM_CAP", "LOCAL_PARK_STOPPED", "DAYTONA_WARM_CAP"])
def test_w_c02_a_wrong_number_or_switch_is_named_and_not_replaced(
    given: pytest.MonkeyPatch, name: str, value: str
) -> None:
    given.setenv(f"HEARTH_{name}", value)
    assert f"HEARTH_{name}" in wrong()


@pytest.mark.parametrize("value", ["0", "false", "off", "no"])
def test_w_c02_a_switch_takes_the_usual_spellings(given: pytest.MonkeyPatch, value: str) -> None:
    given.setenv("HEARTH_LOCAL_PARK_STOPPED", value)
    assert read().tiers()["local"].park_stopped is False


def test_daytona_is_set_up_by_its_variables(given: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROVIDERS": "local,daytona",
        "DAYTONA_API_KEY": "dtn_key",
        "DAYTONA_API_URL": "https://example.test/api/",
        "DAYTONA_TARGET": "eu",
        "DAYTONA_SNAPSHOT": "agents",
        "DAYTONA_VOLUME": "none",
        "DAYTONA_DAEMON": '["daemon", "{port}"]',
        "DAYTONA_AUTO_STOP_MINUTES": "20",
    }.items():
        given.setenv(f"HEARTH_{name}", value)
    settings = read()
    options = settings.daytona_options()
    assert (options.api_url, options.api_key.reveal()) == ("https://example.test/api", "dtn_key")
    assert (options.target, options.snapshot, options.volume) == ("eu", "agents", "")
    assert (options.daemon, options.auto_stop_minutes) == (("daemon", "{port}"), 20)
    # A worker must still be there when the provider gives up.
    deadlines = settings.deadlines()
    for mine, limit in (
        (options.create_seconds, deadlines.create),
        (options.start_seconds, deadlines.start),
        (options.daemon_seconds + options.call_seconds, deadlines.start),
        (options.stop_seconds, deadlines.stop),
        (options.delete_seconds, deadlines.delete),
    ):
        assert mine < limit * 0.8
    assert "dtn_key" not in repr(settings)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "HEARTH_DAYTONA_API_KEY"),
        ({"API_KEY": "dtn_key", "SNAPSHOT": "a", "IMAGE": "b"}, "HEARTH_DAYTONA_IMAGE"),
        ({"API_KEY": "dtn_key", "AUTO_STOP_MINUTES": "0"}, "HEARTH_DAYTONA_AUTO_STOP_MINUTES"),
        ({"API_KEY": "dtn_key", "AUTO_STOP_MINUTES": "1.5"}, "HEARTH_DAYTONA_AUTO_STOP_MINUTES"),
        ({"API_KEY": "dtn_key", "AUTO_DELETE_MINUTES": "-1"}, "HEARTH_DAYTONA_AUTO_DELETE_MINUTES"),
        ({"API_KEY": "dtn_key", "DAEMON": "[]"}, "HEARTH_DAYTONA_DAEMON"),
        ({"API_KEY": "dtn_key", "MOUNT": "relative"}, "HEARTH_DAYTONA_MOUNT"),
    ],
)
def test_w_r10_what_is_wrong_with_daytona_is_named_at_the_start_and_the_key_is_not(
    given: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    given.setenv("HEARTH_PROVIDERS", "local,daytona")
    for name, value in variables.items():
        given.setenv(f"HEARTH_DAYTONA_{name}", value)
    text = wrong()
    assert named in text
    assert "dtn_key" not in text


def test_a_provider_that_would_stop_what_is_in_use_or_parked_is_refused_by_the_name_of_its_timer(
    given: pytest.MonkeyPatch,
) -> None:
    given.setenv("HEARTH_PROVIDERS", "local,daytona")
    given.setenv("HEARTH_DAYTONA_API_KEY", "key")
    assert read().tiers()["daytona"].slots == 20
    # 2 x 4 min + 2 min.
    given.setenv("HEARTH_DAYTONA_AUTO_STOP_MINUTES", "9")
    assert wrong().startswith("HEARTH_DAYTONA_AUTO_STOP_MINUTES=9 must be at least 10 minutes")
    # The longest parked window, after a Stop, is 10 min.
    given.setenv("HEARTH_DAYTONA_AUTO_STOP_MINUTES", "12")
    assert wrong().startswith("HEARTH_DAYTONA_AUTO_STOP_MINUTES=12 must be more than 12 minutes")
    given.setenv("HEARTH_DAYTONA_WARM_WINDOW", "0")
    assert read().daytona_auto_stop_minutes == 12
    # Where it is not switched on, nothing of it is checked.
    given.setenv("HEARTH_PROVIDERS", "local")
    given.setenv("HEARTH_DAYTONA_AUTO_STOP_MINUTES", "1")
    assert read().providers == ["local"]
