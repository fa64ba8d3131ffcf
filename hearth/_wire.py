"""Protobuf's wire form, as far as it takes to put messages together that are serialized already.

An event keeps the bytes of its first serialization for as long as it may have to be sent again, so requests are joined
from bytes and never built as messages.
"""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A number >= 0 in base 128, lowest digits first."""
    if value < 0x80:
        return bytes((value,))
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def number_field(number: int, value: int) -> bytes:
    """An unsigned or boolean field."""
    return varint(number << 3) + varint(value)


def bytes_field(number: int, content: bytes) -> bytes:
    """A string, bytes or message field; `content` is the message serialized."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def bytes_field_head(number: int, length: int) -> bytes:
    """What comes before a content of `length` bytes."""
    return varint(number << 3 | 2) + varint(length)
