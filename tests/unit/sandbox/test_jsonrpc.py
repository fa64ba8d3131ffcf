"""Messages are passed on byte for byte where that is possible, and refused with the field at fault where not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sandbox.agentd.jsonrpc import (
    Lines,
    LineTooLong,
    MalformedMessage,
    Message,
    read_agent_line,
    read_client_message,
)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"jsonrpc":"2.0", "id":1, "method":"a"}', Message(b"", method="a", request="1")),
        (b'{"jsonrpc":"2.0","id":"1","method":"a"}', Message(b"", method="a", request='"1"')),
        (b'{"jsonrpc":"2.0","method":"a","params":{"n":1.0e2}}', Message(b"", method="a")),
        (b'{"jsonrpc":"2.0","id":0,"result":null}', Message(b"", answer="0")),
        (b'{"jsonrpc":"2.0","id":0,"error":{"code":1}}', Message(b"", answer="0")),
    ],
)
def test_client_messages_pass_unchanged(body: bytes, message: Message) -> None:
    read = read_client_message(body)
    assert (read.line, read.method, read.request, read.answer) == (
        body,
        message.method,
        message.request,
        message.answer,
    )


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b"{", "JSON"),
        (b"\xff\xfe{\x00}\x00", "JSON"),
        (b'{"jsonrpc":"2.0","method":"a","params":{"x":NaN}}', "NaN"),
        (b'{"jsonrpc":"2.0","id":1,"method":"a","x":' + b"[" * 100_000, "nested"),
        (b'{"id":1,"method":"a"}', "'jsonrpc'"),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"a"}', "'id'"),
        (b'{"jsonrpc":"2.0","id":true,"method":"a"}', "'id'"),
        (b'{"jsonrpc":"2.0","id":null,"result":1}', "'id'"),
        (b'{"jsonrpc":"2.0","id":1,"method":null}', "'method'"),
        (b'{"jsonrpc":"2.0","id":1}', "neither"),
    ],
)
def test_what_is_no_client_message_says_why(body: bytes, word: str) -> None:
    with pytest.raises(MalformedMessage, match=word):
        read_client_message(body)


def test_a_message_of_several_lines_becomes_one() -> None:
    value = {"jsonrpc": "2.0", "id": 1, "method": "a", "params": {"text": "a\nb é \ud800"}}
    line = read_client_message(json.dumps(value, indent=1).encode()).line
    assert b"\n" not in line
    assert json.loads(line) == value


@pytest.mark.parametrize(
    ("line", "method", "answer"),
    [
        (b'{"jsonrpc":"2.0","id":3,"result":{}}', None, "3"),
        (b'{"jsonrpc":"2.0","id":"x","error":{}}', None, '"x"'),
        (b'{"jsonrpc":"2.0","id":3,"method":"session/request_permission"}', "session/request_permission", None),
        (b'{"jsonrpc":"2.0","method":"session/update"}', "session/update", None),
        (b'{"id":null,"error":{}}', None, None),
        (b"{}", None, None),
    ],
)
def test_agent_lines_are_told_apart(line: bytes, method: str | None, answer: str | None) -> None:
    assert read_agent_line(line + b"\r") == Message(line, method=method, answer=answer)


def test_a_carriage_return_inside_does_not_cut_the_stream() -> None:
    assert read_agent_line(b'{"id":1,\r"result":"a\\rb"}').line == b'{"id":1,"result":"a\\rb"}'


@pytest.mark.parametrize("line", [b"hello", b'"text"', b"[1]", b"\xff", b"{", b"[" * 100_000, b'{"a":1e}'])
def test_garbage_is_told_apart(line: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_agent_line(line)


@given(st.lists(st.binary(max_size=30)), st.data())
def test_lines_come_out_however_they_are_cut(parts: list[bytes], data: st.DataObject) -> None:
    text = b"\n".join(parts)
    lines, found = Lines(), []
    while text:
        size = data.draw(st.integers(1, len(text)))
        found += lines.feed(text[:size])
        text = text[size:]
    found += lines.feed(b"\n")
    assert found == [line for part in parts for line in part.split(b"\n") if line.strip()]


def test_a_line_may_be_as_long_as_the_limit_and_no_longer() -> None:
    lines = Lines(10)
    assert lines.feed(b"01234") == []
    assert lines.feed(b"56789\nab") == [b"0123456789"]
    assert lines.feed(b"cdefghij") == []
    with pytest.raises(LineTooLong):
        lines.feed(b"k")
