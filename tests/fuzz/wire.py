"""What is not gRPC, sent to its port: broken HTTP/2, other protocols, connections that say nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.support.rpcs import RPCS

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_OPENING = _PREFACE + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
# A server that neither answers nor closes is left alone after this, as a client that is gone leaves it.
_SECONDS = 2.0
_READ_BYTES = 64 * 1024
_WITHIN_TLS = 0.7


class Attack(NamedTuple):
    """What is written, piece by piece, and how long the connection then stays, in seconds."""

    pieces: Sequence[bytes]
    stays: float = 0.3


async def attack(address: str, chance: random.Random, tls: ssl.SSLContext | None = None, *, large: bool = True) -> str:
    """Make some attack at host:port, mostly within TLS where that is spoken there; its name. `large`: also one that
    fills megabytes.

    Raises `OSError` when nobody listens there any more.
    """
    made = chance.choice((*_ATTACKS, *_LARGE) if large else _ATTACKS)
    pieces, stays = made(chance)
    host, _, port = address.rpartition(":")
    within = tls if chance.random() < _WITHIN_TLS else None
    reader, writer = await asyncio.open_connection(host, int(port), ssl=within)
    # What it does to the connection is its own affair, as long as the next one is taken.
    with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
        async with asyncio.timeout(_SECONDS):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            async with asyncio.timeout(stays):
                while await reader.read(_READ_BYTES):
                    pass
    writer.transport.abort()
    return made.__name__.lstrip("_")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field, neither compressed nor kept."""
    return b"\x00" + _text(name) + _text(value)


def _text(data: bytes) -> bytes:
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, out = len(data) - 127, bytearray(b"\x7f")
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes(out) + bytes((rest,)) + data


def _call_headers(chance: random.Random, *more: tuple[bytes, bytes]) -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": chance.choice(RPCS).path.encode(),
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"authorization": b"Bearer token-of-the-operator",
        **dict(more),
    }
    return b"".join(_literal(*field) for field in fields.items())


def _opened(chance: random.Random, *more: tuple[bytes, bytes]) -> bytes:
    """A connection with one call that waits for its message."""
    return _OPENING + _frame(_HEADERS, _END_HEADERS, 1, _call_headers(chance, *more))


def _noise(chance: random.Random) -> Attack:
    return Attack([chance.randbytes(chance.choice((1, 9, 24, 500, 20_000)))])


def _other_protocol(chance: random.Random) -> Attack:
    return Attack(
        [
            chance.choice(
                (
                    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
                    b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000,
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(512),
                    b"*1\r\n$4\r\nPING\r\n",
                    b"\x00\x00\x00\x08\x04\xd2\x16\x2f",
                    b"SSH-2.0-x\r\n",
                )
            )
        ]
    )


def _half_open(chance: random.Random) -> Attack:
    return Attack([chance.choice((b"", _PREFACE[:10], _PREFACE, _OPENING, _OPENING + b"\x00"))], stays=_SECONDS)


def _random_frames(chance: random.Random) -> Attack:
    frames = [
        _frame(
            chance.randrange(12),
            chance.randrange(256),
            chance.choice((0, 1, 2, 3, 5, 2**31 - 1, 2**31)),
            chance.randbytes(chance.choice((0, 1, 4, 5, 6, 8, 100))),
        )
        for _ in range(chance.choice((1, 5, 50)))
    ]
    return Attack([_OPENING, *frames])


def _announced(_: random.Random) -> Attack:
    return Attack([_OPENING, b"\xff\xff\xff" + bytes((_HEADERS, _END_HEADERS, 0, 0, 0, 1)) + b"\x00" * 100], stays=1.0)


def _flood(chance: random.Random) -> Attack:
    one = chance.choice(
        (
            _frame(_PING, 0, 0, b"12345678"),
            _frame(_SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x00" * 10),
            _frame(_SETTINGS, 0, 0, b"\x00\x01" + b"\xff" * 4),
            _frame(_PRIORITY, 0, 1, b"\x00\x00\x00\x01\xff"),
            _frame(_WINDOW, 0, 0, b"\x7f\xff\xff\xff"),
            _frame(_WINDOW, 0, 0, b"\x00" * 4),
            _frame(_GOAWAY, 0, 0, b"\x00" * 8 + b"x" * 1_000),
            _frame(_DATA, 0, 0, b"x"),
        )
    )
    return Attack([_OPENING, one * 2_000])


def _reset_storm(chance: random.Random) -> Attack:
    headers = _call_headers(chance)
    return Attack(
        [
            _OPENING,
            *(
                _frame(_HEADERS, _END_HEADERS, stream, headers) + _frame(_RESET, 0, stream, b"\x00\x00\x00\x08")
                for stream in range(1, 401, 2)
            ),
        ]
    )


def _endless_headers(chance: random.Random) -> Attack:
    more = _frame(_CONTINUATION, 0, 1, _literal(b"x", b"a" * 15_000))
    return Attack([_OPENING, _frame(_HEADERS, 0, 1, _call_headers(chance)), *[more] * 60])


def _header_bomb(chance: random.Random) -> Attack:
    """4 KB in the table of headers, and then named a byte each."""
    kept = b"\x40" + _text(b"x") + _text(b"a" * 3_900)
    return Attack([_OPENING, _frame(_HEADERS, _END_HEADERS, 1, _call_headers(chance) + kept + b"\xbe" * 10_000)])


def _wrong_headers(chance: random.Random) -> Attack:
    field = chance.choice(
        (
            (b"authorization", b"Bearer \xff\xfe"),
            (b"authorization", b"Bearer \xed\xa0\x80"),
            (b"authorization", b"\x00"),
            (b"authorization", b"Bearer " + b"\x80" * 3_000),
            (b"traceparent", b"00-\xff"),
            (b"baggage", b"\xff=\xff"),
            (b"grpc-timeout", b"99999999999H"),
            (b"grpc-timeout", b"-1S"),
            (b"grpc-timeout", b"\xff"),
            (b"grpc-encoding", b"none-such"),
            (b"content-type", b"text/html"),
            (b":path", b"hearth"),
            (b":path", b"/\xff/\xff"),
            (b":path", b"/hearth.session.v1.SessionService/None"),
            (b":path", b"/" + b"a" * 5_000),
            (b":method", b"GET"),
            (b":status", b"200"),
            (b"Upper", b"x"),
            (b"", b"x"),
            (b"x-bin", b"!!!"),
            (b"x\ny", b"x\r\ny"),
        )
    )
    return Attack([_opened(chance, field), _frame(_DATA, _END_STREAM, 1, b"\x00" * 5)])


def _wrong_message(chance: random.Random) -> Attack:
    body = chance.choice(
        (
            b"\x00\x00\x00\x00\x00",
            b"\x01\x00\x00\x00\x04abcd",
            b"\xff\x00\x00\x00\x00",
            b"\x00\xff\xff\xff\xff",
            b"\x00\x00\x40\x00\x01" + b"a" * 1_000,
            b"\x00\x00\x00\x00\x64a",
            b"\x00",
            b"\x00\x00\x00\x00\x01aa",
            b"\x01\x00\x00\x00\x14" + b"\x1f\x8b\x08" + b"\x00" * 17,
        )
    )
    encoding = chance.choice((b"identity", b"gzip", b"deflate"))
    flags = chance.choice((0, _END_STREAM))
    return Attack([_opened(chance, (b"grpc-encoding", encoding)), _frame(_DATA, flags, 1, body)])


def _in_small_pieces(chance: random.Random) -> Attack:
    whole = _opened(chance) + _frame(_DATA, _END_STREAM, 1, b"\x00" * 5)
    return Attack([whole[at : at + 7] for at in range(0, len(whole), 7)])


_ATTACKS: tuple[Callable[[random.Random], Attack], ...] = (
    _noise,
    _other_protocol,
    _half_open,
    _random_frames,
    _announced,
    _flood,
    _reset_storm,
    _wrong_headers,
    _wrong_message,
    _in_small_pieces,
)
_LARGE = (_endless_headers, _header_bomb)
