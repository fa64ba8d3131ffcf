"""What counts for the identity of a configuration and of a conversation, and what does not."""

from __future__ import annotations

import pytest

from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2
from services.pool.warm.fingerprints import (
    Defaults,
    config_fingerprint,
    conversation,
    expectation,
    meets,
    wants_tail,
)


def config(**fields: object) -> str:
    return config_fingerprint(sessions.SessionSpec(**fields), Defaults("scripted"))  # type: ignore[arg-type]


def test_w_c05_a_field_left_out_equals_its_default() -> None:
    assert config() == config(agent="scripted") == config(sandbox=sandbox_pb2.SandboxSpec())
    assert config() == config(permissions=sessions.PermissionPolicy())
    assert config() == config(
        permissions=sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_DENY),
        sandbox=sandbox_pb2.SandboxSpec(
            provider="local", resources=sandbox_pb2.Resources(), network=sandbox_pb2.NetworkPolicy()
        ),
    )


def test_the_defaults_are_those_of_the_deployment() -> None:
    spec = sessions.SessionSpec()
    assert config_fingerprint(spec, Defaults("scripted")) != config_fingerprint(spec, Defaults("codex"))
    assert config_fingerprint(spec, Defaults("codex")) == config(agent="codex")
    assert config_fingerprint(spec, Defaults("scripted", "daytona")) != config()


def test_w_c04_what_has_no_order_has_none() -> None:
    assert config(model_capabilities=["vision", "audio"]) == config(model_capabilities=["audio", "vision", "audio"])
    one, other = (
        sandbox_pb2.SandboxSpec(
            network=sandbox_pb2.NetworkPolicy(mode=sandbox_pb2.NETWORK_MODE_ALLOW_LIST, allow=allow)
        )
        for allow in (["10.0.0.0/8", "192.168.0.0/16"], [" 192.168.0.0/16", "10.0.0.0/8"])
    )
    assert config(sandbox=one) == config(sandbox=other)
    bound = [sessions.CredentialBinding(credential=name, target=name.upper()) for name in ("a", "b")]
    assert config(credentials=bound) == config(credentials=bound[::-1])


def test_w_c04_a_spec_is_not_changed_by_looking_at_it() -> None:
    spec = sessions.SessionSpec(model_capabilities=["b", "a"])
    before = spec.SerializeToString()
    config_fingerprint(spec, Defaults("scripted"))
    assert spec.SerializeToString() == before


def test_w_c04_limits_do_not_count() -> None:
    limits = sessions.TurnLimits()
    limits.turn.FromSeconds(5)
    assert config(limits=limits) == config()


@pytest.mark.parametrize(
    "fields",
    [
        {"agent": "other"},
        {"model": "m"},
        {"model_capabilities": ["vision"]},
        {"instructions": "Be brief."},
        {"mcp_servers": [sessions.McpServer(name="a", stdio=sessions.McpStdio(command=["x"]))]},
        {"permissions": sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ALLOW)},
        {"sandbox": sandbox_pb2.SandboxSpec(env={"A": "1"})},
        {"credentials": [sessions.CredentialBinding(credential="a", target="A")]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_w_c05_w_e09_everything_else_counts(fields: dict[str, object]) -> None:
    assert config(**fields) != config()
    assert config(**fields) == config(**fields)


def test_the_order_of_a_map_does_not_count() -> None:
    one = sandbox_pb2.SandboxSpec(env={"A": "1", "B": "2"})
    other = sandbox_pb2.SandboxSpec(env={"B": "2", "A": "1"})
    assert config(sandbox=one) == config(sandbox=other)


def user(text: str, *, attachment: str = "", media: bytes = b"") -> event_pb2.Event:
    content = [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]
    if attachment:
        content.append(content_pb2.ContentPart(attachment=content_pb2.AttachmentPart(attachment_id=attachment)))
    if media:
        inline = content_pb2.InlineMediaPart(media_type="image/png", data=media)
        content.append(content_pb2.ContentPart(inline_media=inline))
    message = event_pb2.MessageCompleted(role=content_pb2.ROLE_USER, content=content)
    return event_pb2.Event(message_completed=message)


def agent(text: str) -> event_pb2.Event:
    content = [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]
    return event_pb2.Event(message_completed=event_pb2.MessageCompleted(role=content_pb2.ROLE_AGENT, content=content))


def tool(tool_call_id: str) -> event_pb2.Event:
    return event_pb2.Event(tool_completed=event_pb2.ToolCompleted(tool_call_id=tool_call_id))


LOG = [user("one"), agent("fine"), tool("t1"), tool("t2"), user("two", media=b"png"), tool("t3"), agent("done")]


def expected(*events: event_pb2.Event, tail: bool = False) -> bytes:
    message = sessions.ExpectedTranscript(tail_only=tail)
    for event in events:
        if event.HasField("tool_completed"):
            message.entries.add(tool_call_id=event.tool_completed.tool_call_id)
            continue
        (found,) = conversation([event])
        said = message.entries.add().user_message
        said.text = found.text  # type: ignore[union-attr]
        said.attachment_ids.extend(found.attachment_ids)  # type: ignore[union-attr]
        said.media_digests.extend(found.media_digests)  # type: ignore[union-attr]
    return expectation(message)


def seen() -> list[event_pb2.Event]:
    return [event for event in LOG if event.message_completed.role != content_pb2.ROLE_AGENT]


def test_w_c07_what_the_agent_said_does_not_count() -> None:
    assert meets(conversation(LOG), expected(*seen()))
    shorter = [event for event in LOG if event.message_completed.role != content_pb2.ROLE_AGENT]
    assert meets(conversation(shorter), expected(*seen()))


def test_w_c08_a_call_and_its_result_count_once() -> None:
    twice = [event for event in seen() for _ in range(2 if event.HasField("tool_completed") else 1)]
    assert meets(conversation(LOG), expected(*twice))


@pytest.mark.parametrize(
    "other",
    [
        [user("one!"), *seen()[1:]],
        seen()[:-1],
        [*seen(), tool("t4")],
        [*seen(), user("three")],
        [user("one", attachment="a"), *seen()[1:]],
        [*seen()[:3], user("two", media=b"other"), *seen()[4:]],
        [*seen()[:3], user("two"), *seen()[4:]],
        [seen()[0], seen()[2], seen()[1], *seen()[3:]],
        [],
    ],
    ids=[
        "text",
        "fewer tools",
        "more tools",
        "more messages",
        "attachment",
        "other media",
        "no media",
        "order",
        "none",
    ],
)
def test_w_c07_w_c08_any_difference_is_another_conversation(other: list[event_pb2.Event]) -> None:
    assert not meets(conversation(LOG), expected(*other))


def test_a_tail_is_compared_from_the_last_user_message_on() -> None:
    assert meets(conversation(LOG), expected(user("two", media=b"png"), tool("t3"), tail=True))
    assert not meets(conversation(LOG), expected(user("two"), tool("t3"), tail=True))
    assert not meets(conversation(LOG), expected(user("two", media=b"png"), tail=True))
    assert meets([], expected(tail=True))


def test_w_d05_a_caller_that_holds_its_last_message_only_is_compared_with_that() -> None:
    last = [user("two", media=b"png"), tool("t3")]
    assert wants_tail(expected(*last))
    assert meets(conversation(LOG), expected(*last))
    assert not meets(conversation(LOG), expected(user("two!", media=b"png"), tool("t3")))
    assert not meets(conversation(LOG), expected(user("two", media=b"png")))
    # A tool call before the message belongs to a turn that the caller would have to show too.
    assert not wants_tail(expected(tool("t2"), *last))
    assert not meets(conversation(LOG), expected(tool("t2"), *last))
    assert not wants_tail(expected(*seen()))


def test_an_empty_conversation_is_met_by_nothing_only() -> None:
    assert meets([], expected())
    assert not meets(conversation(LOG), expected())
    assert not meets([], expected(user("one")))


def test_w_c07_the_order_of_attachments_counts() -> None:
    def said(*ids: str) -> event_pb2.Event:
        content = [content_pb2.ContentPart(attachment=content_pb2.AttachmentPart(attachment_id=one)) for one in ids]
        message = event_pb2.MessageCompleted(role=content_pb2.ROLE_USER, content=content)
        return event_pb2.Event(message_completed=message)

    assert meets(conversation([said("a", "b")]), expected(said("a", "b")))
    assert not meets(conversation([said("a", "b")]), expected(said("b", "a")))


def test_w_c08_what_a_turn_leaves_is_what_the_next_request_brings() -> None:
    before = [*LOG]
    turn = [user("three"), tool("t9"), tool("t9"), agent("")]
    assert meets(conversation([*before, *turn]), expected(*seen(), user("three"), tool("t9")))
