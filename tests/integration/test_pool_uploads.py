"""Uploads over gRPC whose caller goes silent: they end, with a status that says so."""

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
from services.pool.attachments import PAUSE_SECONDS
from services.pool.requests import Known
from services.pool.service import SessionService
from tests.contract.pool.house import eventually
from tests.contract.pool.refusals import refused
from tests.unit.pool.clocks import ManualClock


@asynccontextmanager
async def serving(clock: ManualClock) -> AsyncIterator[session_service_pb2_grpc.SessionServiceAsyncStub]:
    """The service with nothing behind it: what is refused before it is stored reaches nothing."""
    behind = cast(Any, None)

    @asynccontextmanager
    async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
        service = SessionService(
            store=behind,
            inputs=behind,
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


def requests_before(silence: str) -> list[calls.PutAttachmentRequest]:
    """What is sent before the caller goes silent."""
    description = calls.AttachmentDescription(
        session=session_pb2.SessionKey(project="acme", session="s"),
        request_id="r",
        name="a.txt",
        media_type="text/plain",
        size_bytes=10,
        digest=hashlib.sha256(b"0123456789").hexdigest(),
    )
    messages = [calls.PutAttachmentRequest(description=description), calls.PutAttachmentRequest(chunk=b"01234")]
    return messages[: ["description", "chunk", "rest"].index(silence)]


@pytest.mark.parametrize("silence", ["description", "chunk", "rest"])
async def test_an_upload_that_goes_silent_is_ended(silence: str) -> None:
    clock = ManualClock()
    before = requests_before(silence)

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
