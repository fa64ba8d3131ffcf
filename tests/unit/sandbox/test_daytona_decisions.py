"""What Daytona says, in our words: states, next steps, ages, network policies, errors, and commands for the shell."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from daytona import DaytonaConnectionError, DaytonaError, DaytonaTimeoutError

from hearth.secret import Secret, hidden
from services.sandbox.compatibility import AgentCommand
from services.sandbox.providers import daytona_inside as inside
from services.sandbox.providers.daytona_errors import Subject, translate
from services.sandbox.providers.daytona_options import SANDBOX_AGENT, DaytonaOptions
from services.sandbox.providers.daytona_states import (
    Step,
    age,
    instance_state,
    shown_network,
    to_start,
    to_stop,
    wanted_network,
)
from services.sandbox.providers.daytona_values import Network, Rejected, Seen, StateClash, VolumeMissing
from services.sandbox.providers.daytona_volume import subpath
from services.sandbox.providers.port import (
    DaemonRequest,
    InstanceNotFound,
    InstanceState,
    NameTaken,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
)
from services.sandbox.rows import Key

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def seen(state: str, desired: str = "") -> Seen:
    return Seen("id", "hearth-1", state, desired)


@pytest.mark.parametrize(
    ("state", "desired", "meant", "start", "stop"),
    [
        ("started", "started", InstanceState.RUNNING, Step.DONE, Step.ASK),
        ("started", "", InstanceState.RUNNING, Step.DONE, Step.ASK),
        ("started", "stopped", InstanceState.STOPPING, Step.WAIT, Step.WAIT),
        ("started", "destroyed", InstanceState.DELETING, Step.WAIT, Step.WAIT),
        ("stopped", "stopped", InstanceState.STOPPED, Step.ASK, Step.DONE),
        ("stopped", "", InstanceState.STOPPED, Step.ASK, Step.DONE),
        ("stopped", "started", InstanceState.STARTING, Step.WAIT, Step.WAIT),
        ("stopped", "destroyed", InstanceState.DELETING, Step.WAIT, Step.WAIT),
        ("archiving", "archived", InstanceState.STOPPED, Step.ASK, Step.DONE),
        ("archived", "archived", InstanceState.STOPPED, Step.ASK, Step.DONE),
        ("archived", "started", InstanceState.STARTING, Step.WAIT, Step.WAIT),
        ("paused", "paused", InstanceState.UNKNOWN, Step.ASK, Step.ASK),
        ("starting", "started", InstanceState.STARTING, Step.WAIT, Step.WAIT),
        ("stopping", "stopped", InstanceState.STOPPING, Step.WAIT, Step.WAIT),
        ("pulling_snapshot", "started", InstanceState.CREATING, Step.WAIT, Step.WAIT),
        ("error", "started", InstanceState.ERROR, Step.BROKEN, Step.BROKEN),
        ("build_failed", "started", InstanceState.ERROR, Step.BROKEN, Step.BROKEN),
        ("error", "destroyed", InstanceState.ERROR, Step.BROKEN, Step.BROKEN),
        ("destroying", "destroyed", InstanceState.DELETING, Step.WAIT, Step.WAIT),
        ("destroyed", "destroyed", InstanceState.DELETING, Step.GONE, Step.GONE),
        ("unknown", "started", InstanceState.UNKNOWN, Step.WAIT, Step.WAIT),
        ("unknown_default_open_api", "", InstanceState.UNKNOWN, Step.WAIT, Step.WAIT),
        ("", "", InstanceState.UNKNOWN, Step.WAIT, Step.WAIT),
    ],
)
def test_w_r02_states_and_next_steps(state: str, desired: str, meant: InstanceState, start: Step, stop: Step) -> None:
    given = seen(state, desired)
    assert (instance_state(given), to_start(given), to_stop(given)) == (meant, start, stop)


def test_an_age_that_cannot_be_told_is_young() -> None:
    made = (NOW - timedelta(minutes=5)).isoformat().replace("+00:00", "Z")
    assert age(made, NOW) == 300
    assert age((NOW + timedelta(minutes=5)).isoformat(), NOW) == 0
    assert age("2025-12-31T23:59:00", NOW) == 60
    assert age("", NOW) == age("yesterday", NOW) == 0


def test_w_r04_network_policies_are_compared_without_order_and_blanks() -> None:
    assert wanted_network("", ()) is None
    assert wanted_network("ALLOW_LIST", (" b ", "a", "b")) == Network(block_all=False, allow=("a", "b"))
    assert wanted_network("ALLOW_LIST", (" ",)) == wanted_network("BLOCKED", ()) == Network(block_all=True)
    shown = Seen("i", "n", "started", block_all=False, allow="b, a")
    assert shown_network(shown) == wanted_network("ALLOW_LIST", ("a", "b"))
    assert shown_network(seen("started")) is None


def error(status: int | None, body: str = '{"message": "no"}', **headers: str) -> DaytonaError:
    found = DaytonaError("no dtn_key here", status_code=status, headers=headers)

    class FromApi(Exception):
        pass

    cause = FromApi()
    cause.body = body  # type: ignore[attr-defined]
    found.__cause__ = cause
    return found


def told(given: DaytonaError, subject: Subject = Subject.SANDBOX) -> ProviderError:
    return translate(given, "get", subject, lambda text: text.replace("dtn_key", "***"), NOW)


@pytest.mark.parametrize(
    ("status", "subject", "kind"),
    [
        (400, Subject.CHANGE, Rejected),
        (403, Subject.CHANGE, Rejected),
        (409, Subject.CHANGE, StateClash),
        (400, Subject.CREATE, ProviderRefused),
        (403, Subject.CREATE, ProviderRefused),
        (404, Subject.CREATE, ProviderRefused),
        (409, Subject.CREATE, NameTaken),
        (404, Subject.SANDBOX, InstanceNotFound),
        (404, Subject.CHANGE, InstanceNotFound),
        (404, Subject.VOLUME, VolumeMissing),
        (404, Subject.INSIDE, ProviderUnavailable),
        (404, Subject.ACCOUNT, ProviderUnavailable),
        (401, Subject.SANDBOX, ProviderError),
        (418, Subject.SANDBOX, ProviderError),
        (408, Subject.INSIDE, ProviderUnavailable),
        (429, Subject.CREATE, ProviderUnavailable),
        (500, Subject.CHANGE, ProviderUnavailable),
        (502, Subject.SANDBOX, ProviderUnavailable),
        (599, Subject.SANDBOX, ProviderUnavailable),
        (None, Subject.SANDBOX, ProviderError),
    ],
)
def test_each_status_is_one_error_of_ours(status: int | None, subject: Subject, kind: type[ProviderError]) -> None:
    found = told(error(status), subject)
    assert type(found) is kind
    assert "dtn_key" not in str(found)


def test_a_lost_connection_and_a_time_out_may_go_by() -> None:
    for lost in (DaytonaConnectionError("reset"), DaytonaTimeoutError("late")):
        assert type(told(lost)) is ProviderUnavailable


@pytest.mark.parametrize("body", ["<html>", "", "[]", '{"message": "Cannot GET /sandbox/x"}', '{"error": "Not Found"}'])
def test_a_404_that_is_not_of_the_api_proves_nothing(body: str) -> None:
    assert type(told(error(404, body))) is ProviderUnavailable
    assert type(told(error(404, body), Subject.VOLUME)) is ProviderUnavailable


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"RETRY-AFTER": "1.5"}, 1.5),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:09 GMT"}, 9.0),
        ({"X-RateLimit-Reset-sandbox-create": "4"}, 4.0),
        ({"Retry-After": "86400"}, 60.0),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_when_to_come_back_is_read_however_it_is_written(headers: dict[str, str], seconds: float | None) -> None:
    found = told(error(429, **headers))
    assert isinstance(found, ProviderUnavailable)
    assert found.retry_after == seconds


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_what_every_answer_says_of_the_rate_limit_is_no_time_to_come_back(status: int) -> None:
    limits = {"X-RateLimit-Reset-authenticated": "59", "X-RateLimit-Remaining-authenticated": "900"}
    found = told(error(status, **limits))
    assert isinstance(found, ProviderUnavailable)
    assert (found.retry_after, found.throttled) == (None, False)
    found = told(error(status, **limits, **{"Retry-After": "2"}))
    assert isinstance(found, ProviderUnavailable)
    assert (found.retry_after, found.throttled) == (2.0, False)
    found = told(error(429, **limits))
    assert isinstance(found, ProviderUnavailable)
    assert (found.retry_after, found.throttled) == (59.0, True)


def test_a_long_message_is_cut_and_is_one_line() -> None:
    found = str(told(DaytonaError("x\n" * 5000, status_code=500)))
    assert "\n" not in found
    assert len(found) < 400


def request() -> DaemonRequest:
    return DaemonRequest(
        token=Secret("the-token"),
        key=Key("p", "s"),
        agents={
            "a": AgentCommand(("run", "a b"), hidden({"OWN": "1", "PLAIN": "agent"})),
            "b": AgentCommand(("b",), hidden({"B": "2"})),
        },
        env=hidden({"PLAIN": "spec"}),
        secrets=hidden({"HIDDEN": "value"}),
        agent="a",
    )


def test_a_daemon_without_a_file_of_agents_runs_with_the_variables_of_the_one_it_is_for() -> None:
    found = inside.variables(request(), "/w", SANDBOX_AGENT)
    assert (found["OWN"], found["PLAIN"], found["HIDDEN"], found[inside.TOKEN]) == ("1", "spec", "value", "the-token")
    assert "B" not in found
    assert inside.AGENTS not in found


def test_a_daemon_with_a_file_of_agents_gives_each_its_own() -> None:
    found = inside.variables(request(), "/w", ("agentd", "--agents-file", "{agents}"))
    assert "OWN" not in found
    agents = json.loads(found[inside.AGENTS])
    assert agents["a"] == {"command": ["run", "a b"], "env": {"OWN": "1", "PLAIN": "spec"}, "cwd": "/w"}
    assert "value" not in found[inside.AGENTS]


def test_what_is_sent_names_the_token_and_does_not_hold_it_and_awkward_words_arrive() -> None:
    words = ("x y", "it's", "$HOME", "--port={port}", "--at={host}:{port}", "", "{other}", "{token}")
    launch = inside._launch(words, 3000)
    script = f"setsid=; h_log=/dev/stdout; h_logs=/l; {inside.TOKEN}=secret; " + launch.replace(
        "$h_setsid env -u HEARTH_AGENTD_TOKEN", "printf '<%s>'"
    ).replace('</dev/null >"$h_log" 2>&1 &', "")
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "<x y><it's><$HOME><--port=3000><--at=0.0.0.0:3000><><{other}><secret>"
    assert "the-token" not in inside.restart_script("i", "/w", words, port=3000, grace=1, kill=1)


def test_answers_are_found_in_whatever_a_shell_prints() -> None:
    assert inside.read("motd\nhearth: started 12\nbye") == inside.Answer("started", "12")
    assert inside.read("hearth: alive 1 2") == inside.Answer("alive", "1 2")
    assert inside.read("say hearth: started 12") == inside.Answer("", "")
    assert inside.log_tail("hearth: ended\na the-token\n\nb\n", [Secret("the-token"), Secret()]) == "a *** | b"
    assert inside.log_tail("hearth: ended\n", []) == "it wrote nothing"


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (("p", "s"), "p/s"),
        (("..", "."), "%2E./%2E"),
        (("a/b", "c d"), "a%2Fb/c%20d"),
        (("ä:1", "x"), "%C3%A4%3A1/x"),
    ],
)
def test_a_session_is_two_names_of_a_path(key: tuple[str, str], path: str) -> None:
    assert subpath(Key(*key)) == path


def test_options_do_not_show_the_key() -> None:
    assert "dtn_key" not in repr(DaytonaOptions(api_url="u", api_key=Secret("dtn_key")))


def test_the_sdk_is_loaded_only_where_the_provider_is_on() -> None:
    script = "import services.sandbox.__main__, sys; print('daytona' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"
