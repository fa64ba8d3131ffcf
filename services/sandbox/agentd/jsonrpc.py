"""Reading JSON-RPC messages without changing them: from the client's POST bodies and from the agent's output lines."""

import json
from dataclasses import dataclass

LINE_BYTES = 16 * 1024 * 1024


class MalformedMessage(ValueError):
    """Not a JSON-RPC message that can be passed on; the text says why."""


class LineTooLong(ValueError):
    """The agent wrote more than the limit without a line end."""


@dataclass(frozen=True)
class Message:
    """One message, with just the facts that decide where it goes.

    `line` is the text to pass on: one line, without its end. `request` is the key of the id when the message is a
    request, `answer` the key of the id when it is a response, both None for a notification.
    """

    line: bytes
    method: str | None = None
    request: str | None = None
    answer: str | None = None


def read_client_message(body: bytes) -> Message:
    """A POST body as a message. Raises MalformedMessage, with the field at fault in its text."""
    value = _load(body)
    if value.get("jsonrpc") != "2.0":
        raise MalformedMessage("field 'jsonrpc' must be \"2.0\"")
    # The body may be spread over lines; on the agent's input a line end would cut the message in two.
    line = json.dumps(value, separators=(",", ":")).encode() if b"\n" in body or b"\r" in body else body
    if "method" in value:
        method = value["method"]
        if not isinstance(method, str):
            raise MalformedMessage("field 'method' must be a string")
        return Message(line, method=method, request=_key(value["id"]) if "id" in value else None)
    if "id" in value and ("result" in value or "error" in value):
        return Message(line, answer=_key(value["id"]))
    raise MalformedMessage("the message has neither 'method' nor 'id' with 'result' or 'error'")


def read_agent_line(line: bytes) -> Message:
    """A line of the agent's output as a message. Raises MalformedMessage when it is not a JSON object."""
    value = _load(line)
    # A carriage return outside of strings is legal JSON, but ends a line of an event stream.
    line = line.strip()
    if b"\r" in line:
        line = json.dumps(value, separators=(",", ":")).encode()
    method = value.get("method")
    if isinstance(method, str):
        return Message(line, method=method)
    if isinstance(value.get("id"), str | int) and ("result" in value or "error" in value):
        return Message(line, answer=_key(value["id"]))
    return Message(line)


class Lines:
    """Cuts a byte stream into lines of at most `limit` bytes."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their ends, empty ones left out. Raises LineTooLong."""
        *complete, rest = chunk.split(b"\n")
        lines: list[bytes] = []
        for part in complete:
            self._add(part)
            line = b"".join(self._parts)
            self._parts, self._size = [], 0
            if line.strip():
                lines.append(line)
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            raise LineTooLong(f"a line of more than {self._limit} bytes")
        if part:
            self._parts.append(part)


def notification(method: str, params: dict[str, object]) -> bytes:
    """A notification of the daemon's own."""
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params}, separators=(",", ":")).encode()


def _load(text: bytes) -> dict[str, object]:
    try:
        # Decoded here, because json would guess UTF-16 and UTF-32 as well.
        value: object = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise MalformedMessage("the JSON is nested too deeply") from None
    except ValueError as error:
        raise MalformedMessage(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedMessage("the message must be a JSON object")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _key(identifier: object) -> str:
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise MalformedMessage("field 'id' must be a string or an integer")
    return json.dumps(identifier)
