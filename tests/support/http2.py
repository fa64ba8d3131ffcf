"""Calls in the bytes of HTTP/2, for what no library would send."""

from __future__ import annotations


def opened(method: bytes, *, window: int | None = None) -> bytes:
    """What a connection begins with that calls `method` with an empty message; `window` is how much of the answer it
    takes, in bytes, None as usual."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": method, b":authority": b"localhost"}
    fields |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    block = b"".join(b"\0" + bytes((len(key),)) + key + bytes((len(value),)) + value for key, value in fields.items())
    chosen = b"" if window is None else (4).to_bytes(2) + window.to_bytes(4)
    settings, headers, message = (4, 0, 0, chosen), (1, 4, 1, block), (0, 1, 1, bytes(5))
    frames = (
        len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload
        for kind, flags, stream, payload in (settings, headers, message)
    )
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames)
