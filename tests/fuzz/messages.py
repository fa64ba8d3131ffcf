"""Hostile messages: shaped by a descriptor and filled with what breaks things, or not shaped at all."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import EncodeError, Message

PROJECT = "fuzz"
SESSIONS = ("one", "two", "three")
_ID = "00000000-0000-4000-8000-000000000001"
_DEPTH = 5

STRINGS = (
    *(
        "",
        "a",
        PROJECT,
        *SESSIONS,
        _ID,
        _ID.upper(),
        "-",
        ".",
        "..",
        "../../etc/passwd",
        "/",
        "\\",
        "a" * 128,
        "a" * 129,
    ),
    *(
        "x" * 70_000,
        "\x00",
        "a\x00b",
        "\n",
        "\r\nX: y",
        "\u202e",
        "\ufeff",
        "ü" * 64,
        "😀" * 40,
        "'; DROP SCHEMA pool;--",
    ),
    *('{"a":1}', "%s%n%d", "${jndi:x}", "*", "NaN", "null", "true", "-1", "1e999", "0x10", "null\u2028", "scripted"),
    *("local", "daytona", "text/plain", "image/png", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),
)
_BYTES = (b"", b"\x00", b"\xff" * 8, b"a" * 16, b"\x80" * 100, b"{}", b"z" * 70_000)
_INTEGERS = (0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 5e-324)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


class Maker:
    """Makes messages from one source of chance, so that a seed names a run."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def wire(self, kind: type[Message]) -> bytes:
        """Bytes to send where a message of `kind` is expected."""
        dice = self._chance.random()
        if dice < 0.05:
            return self._chance.randbytes(self._chance.choice((1, 2, 7, 100, 5_000)))
        if dice < 0.08:
            return self._nested()
        data = self._serialized(self.message(kind))
        return self._damaged(data) if dice < 0.25 else data

    def message(self, kind: type[Message]) -> Message:
        """A message that parses, of which every part may be anything."""
        made = kind()
        self._fill(made, _DEPTH)
        return made

    def text(self) -> str:
        """Any string."""
        return self._chance.choice(STRINGS)

    def _fill(self, message: Message, depth: int) -> None:
        descriptor = message.DESCRIPTOR
        if descriptor.full_name == "hearth.types.v1.SessionKey" and self._chance.random() < 0.7:
            values: Any = message
            values.project, values.session = PROJECT, self._chance.choice(SESSIONS)
            return
        for field in _chosen(descriptor, self._chance):
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                for _ in range(self._chance.choice((0, 1, 1, 2, 3, 65))):
                    self._put(getattr(message, field.name), field, depth)
            elif field.message_type is not None:
                if depth:
                    inner = getattr(message, field.name)
                    inner.SetInParent()
                    self._fill(inner, depth - 1)
            else:
                setattr(message, field.name, self._scalar(field))

    def _put(self, container: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is None:
            container.append(self._scalar(field))
        elif depth:
            self._fill(container.add(), depth - 1)

    def _scalar(self, field: FieldDescriptor) -> Any:
        chance = self._chance
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return chance.choice(_BYTES)
                if field.name == "project" and chance.random() < 0.7:
                    return PROJECT
                return chance.choice(STRINGS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return chance.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return chance.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_FLOAT:
                return chance.choice([value for value in _FLOATS if abs(value) < 1e38 or value in {float("inf")}])
        low, high = _RANGES[field.cpp_type]
        if field.enum_type is not None and chance.random() < 0.8:
            return chance.choice(field.enum_type.values).number
        return chance.choice([value for value in _INTEGERS if low <= value <= high])

    def _serialized(self, message: Message) -> bytes:
        try:
            return message.SerializeToString()
        except EncodeError:
            return b""

    def _damaged(self, data: bytes) -> bytes:
        chance = self._chance
        if not data:
            return chance.randbytes(3)
        if chance.random() < 0.3:
            return data[: chance.randrange(len(data))]
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)

    def _nested(self) -> bytes:
        """A field 1..6 in itself, deeper than any parser follows."""
        data = b""
        tag = bytes([self._chance.randrange(1, 7) << 3 | 2])
        for _ in range(self._chance.choice((90, 120, 900))):
            data = tag + _varint(len(data)) + data
        return data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _chosen(descriptor: Any, chance: random.Random) -> list[FieldDescriptor]:
    """Most fields, some, or none of them."""
    share = chance.choice((0.0, 0.5, 0.9, 0.9, 1.0))
    return [field for field in descriptor.fields if chance.random() < share]
