"""Uploads over gRPC: one that goes silent is ended, and one counts until it is stored, whoever still waits for it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from hearth.session.v1 import session_service_pb2 as calls
from hearth.session.v1 import session_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis.calls import open_channel
from services.chassis.errors import DeadlineExceeded
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings
from services.pool.attachments import (
    MAX_CHUNK_BYTES,
    MAX_UNDER_WAY_BYTES,
    PAUSE_SECONDS,
    Attachment,
    NewAttachment,
)
from services.pool.requests import Known
from services.pool.service import SessionService
from tests.contract.pool.house import eventually
from tests.contract.pool.refusals import refused
from tests.unit.pool.clocks import ManualClock


@asynccontextmanager
async def serving(
    clock: ManualClock, inputs: object = None
) -> AsyncIterator[session_service_pb2_grpc.SessionServiceAsyncStub]:
    """The service with nothing behind it but what stores attachments."""
    behind = cast(Any, None)

    @asynccontextmanager
    async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
        service = SessionService(
            store=behind,
            inputs=cast(Any, inputs),
            commands=behind,
            interactions=behind,
            credentials=behind,
            removal=behind,
            clock=clock,
            known=Known(frozenset(), frozenset()),
            closed=lambda: None,
        )
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(service, app.server)
        yield

    async with (
        started(ChassisSettings(), "test", build) as app,
        open_channel(app.address, app.settings) as channel,
    ):
        yield cast(Any, session_service_pb2_grpc.SessionServiceStub(channel))


def messages(data: bytes, piece: int) -> list[calls.PutAttachmentRequest]:
    """An upload."""
    description = calls.AttachmentDescription(
        session=session_pb2.SessionKey(project="acme", session="s"),
        request_id="r",
        name="a.txt",
        media_type="text/plain",
        size_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )
    chunks = [calls.PutAttachmentRequest(chunk=data[start : start + piece]) for start in range(0, len(data), piece)]
    return [calls.PutAttachmentRequest(description=description), *chunks]


@pytest.mark.parametrize("silence", ["description", "chunk", "rest"])
async def test_an_upload_that_goes_silent_is_ended(silence: str) -> None:
    clock = ManualClock()
    before = messages(b"0123456789", 5)[: ["description", "chunk", "rest"].index(silence)]

    async def requests() -> AsyncIterator[calls.PutAttachmentRequest]:
        for request in before:
            yield request
        await asyncio.Event().wait()

    async def waiting() -> bool:
        # One sleep for each message that came, and one for that which does not come.
        return len(clock.asked) == len(before) + 1

    async with serving(clock) as sessions:
        call = asyncio.ensure_future(refused(sessions.PutAttachment(requests(), timeout=30)))
        await eventually(waiting)
        await clock.advance(PAUSE_SECONDS)
        error = await call
    assert isinstance(error, DeadlineExceeded)
    assert error.reason == "DEADLINE_EXCEEDED"
    assert "sent nothing for 15 s" in error.message


class Storing:
    """Stores attachments when it is let."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.let = asyncio.Event()

    async def attach(self, new: NewAttachment) -> Attachment:
        self.sizes.append(len(new.content))
        await self.let.wait()
        return Attachment("id", new.name, new.media_type, new.digest, len(new.content))


async def test_an_upload_counts_until_it_is_stored_also_when_its_caller_has_left() -> None:
    storing, quarter = Storing(), MAX_UNDER_WAY_BYTES // 4
    large, small = messages(bytes(quarter // 4), MAX_CHUNK_BYTES), messages(b"x", 1)
    async with serving(ManualClock(), storing) as sessions:
        for number in range(1, 5):
            call = sessions.PutAttachment(iter(large), timeout=30)

            async def reached(number: int = number) -> bool:
                return len(storing.sizes) == number

            await eventually(reached)
            call.cancel()
        error = await refused(sessions.PutAttachment(iter(small), timeout=30))
        assert error.reason == "OVERLOADED"
        storing.let.set()
        assert (await sessions.PutAttachment(iter(small), timeout=30)).attachment.size_bytes == 1
    assert storing.sizes == [quarter // 4] * 4 + [1]
