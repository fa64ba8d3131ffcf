"""Sealing of secret values with the keys of the deployment, before they go into a row.

AES-256-GCM of `cryptography`, because it binds a value to the row that it was sealed for: whoever can write the table
cannot move it to another name or project. The first key seals, every key of the list opens, so a key is changed by
putting a new one in front, and dropped once everything was sealed anew.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_VERSION = b"\x01"
_ID_BYTES = 4
_NONCE_BYTES = 12
_HEAD = len(_VERSION) + _ID_BYTES


class NotOpened(Exception):
    """A value was sealed with a key that is not in the list, or it is not what was sealed."""


def new_key() -> str:
    """A new key, as `HEARTH_SECRET_KEY` takes it."""
    return base64.urlsafe_b64encode(os.urandom(KEY_BYTES)).decode()


def parse_keys(text: str) -> list[bytes]:
    """The keys of a list that is separated by commas, the one that seals first; raises ValueError, without the text."""
    keys = []
    for number, part in enumerate(part.strip() for part in text.split(",")):
        if not part:
            continue
        padded = part + "=" * (-len(part) % 4)
        try:
            key = base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"key {number + 1} must be {KEY_BYTES} bytes in base64; `hearth credentials key` makes one"
            )
        keys.append(key)
    return keys


class Sealer:
    """Seals and opens values, and marks requests so that they can be told apart without keeping what they said."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """`keys`: 32 bytes each, at least one."""
        self._ids = [hmac.digest(key, b"hearth key id", hashlib.sha256)[:_ID_BYTES] for key in keys]
        self._sealing = dict(zip(self._ids, map(AESGCM, keys), strict=True))
        # A key of its own for each use.
        self._marking = {
            key_id: hmac.digest(key, b"hearth request mark", hashlib.sha256)
            for key_id, key in zip(self._ids, keys, strict=True)
        }

    def __repr__(self) -> str:
        return f"<{len(self._ids)} keys>"

    def seal(self, value: bytes, place: bytes) -> bytes:
        """Seal a value for a place, which is not secret: it opens there only."""
        key_id, nonce = self._ids[0], os.urandom(_NONCE_BYTES)
        return _VERSION + key_id + nonce + self._sealing[key_id].encrypt(nonce, value, place)

    def open(self, sealed: bytes, place: bytes) -> bytes:
        """What was sealed for a place; raises `NotOpened`."""
        key = self._sealing.get(sealed[len(_VERSION) : _HEAD])
        if key is None or sealed[: len(_VERSION)] != _VERSION:
            raise NotOpened("sealed with a key that is not in HEARTH_SECRET_KEY")
        nonce, content = sealed[_HEAD : _HEAD + _NONCE_BYTES], sealed[_HEAD + _NONCE_BYTES :]
        try:
            return key.decrypt(nonce, content, place)
        except (InvalidTag, ValueError):
            raise NotOpened("not what was sealed for this place") from None

    def newest(self, sealed: bytes) -> bool:
        """Whether something is sealed with the key that seals now."""
        return sealed[:_HEAD] == _VERSION + self._ids[0]

    def mark(self, content: bytes) -> bytes:
        """A mark of a content that holds secrets: a plain digest of a short secret could be guessed."""
        return self._mark(self._ids[0], content)

    def marked(self, mark: bytes, content: bytes) -> bool:
        """Whether a mark is that of a content; one made with a key that is gone is taken for it."""
        key_id = mark[:_ID_BYTES]
        return key_id not in self._marking or hmac.compare_digest(mark, self._mark(key_id, content))

    def _mark(self, key_id: bytes, content: bytes) -> bytes:
        return key_id + hmac.digest(self._marking[key_id], content, hashlib.sha256)
