"""A chat in the browser: FastAPI in front of Hearth, with server-sent events whose ids are cursors.

Run it beside a stack:

    hearth up
    uvicorn examples.fastapi_sse.app:app

A browser that loses its connection reconnects by itself and says in `Last-Event-ID` which event it got last. That id is
a cursor of Hearth, so what it missed comes next, once. Nothing of a reader is kept here: any instance of this program
may answer the reconnect.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from google.protobuf import json_format
from pydantic import BaseModel

import hearth
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import session_pb2

PAGE = Path(__file__).with_name("page.html")
# A real application takes the project from who is logged in, and lets them see their own sessions only.
PROJECT = os.environ.get("CHAT_PROJECT", "demo")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for all requests: it holds one connection to each service."""
    async with hearth.Client.from_environment() as client:
        app.state.client = client
        yield


app = FastAPI(title="Chat", lifespan=lifespan)


class Message(BaseModel):
    """What a person says. The page makes the id, so that a repeated request is no second message."""

    text: str
    request_id: str


class Stop(BaseModel):
    """Which run is meant, so that a late click stops no other."""

    execution_id: str
    request_id: str


@app.get("/")
async def page() -> FileResponse:
    """The page."""
    return FileResponse(PAGE)


@app.post("/sessions/{session}/messages")
async def send(session: str, message: Message, request: Request) -> dict[str, str]:
    """Give the agent a message; while it works, the message waits."""
    client: hearth.Client = request.app.state.client
    key = hearth.session_key(PROJECT, session)
    sent = await client.send(key, message.text, request_id=message.request_id)
    return {"execution_id": sent.started.execution.execution_id, "result": sent.WhichOneof("result") or ""}


@app.post("/sessions/{session}/stop")
async def stop(session: str, wanted: Stop, request: Request) -> dict[str, str]:
    """Stop what runs."""
    client: hearth.Client = request.app.state.client
    key = hearth.session_key(PROJECT, session)
    command = await client.stop(key, execution_id=wanted.execution_id, request_id=wanted.request_id)
    return {"command_id": command.command_id}


@app.get("/sessions/{session}/events")
async def events(session: str, request: Request, last_event_id: Annotated[str, Header()] = "") -> StreamingResponse:
    """The conversation: from its beginning, or after the event that the browser got last."""
    client: hearth.Client = request.app.state.client
    watch = client.watch(hearth.session_key(PROJECT, session), after=cursor_of(last_event_id))
    # Proxies that gather output would hold live text back.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(as_sse(watch), media_type="text/event-stream", headers=headers)


@app.exception_handler(hearth.CallError)
async def refused(_: Request, error: Exception) -> JSONResponse:
    """What Hearth refuses is told by its reason, see docs/errors.md."""
    assert isinstance(error, hearth.CallError)
    status = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "UNAVAILABLE": 503}.get(error.code.name, 409)
    return JSONResponse({"reason": error.reason, "message": error.message}, status_code=status)


async def as_sse(watch: hearth.Watch) -> AsyncIterator[str]:
    """Items as server-sent events. Only durable events have an id; a comment keeps the connection alive.

    When the browser goes away this is closed, and with it the watch. A cursor that the log does not know any more is
    told as `refused`, and the page starts from the beginning.
    """
    # The browser holds nothing that this stream did not send.
    yield "event: reset\ndata: {}\n\n"
    try:
        async for item in watch:
            yield sse_of(item)
    except hearth.CallError as error:
        yield f"event: refused\ndata: {json.dumps({'reason': error.reason})}\n\n"


def sse_of(item: relay_pb2.Item) -> str:
    """One item as one server-sent event."""
    kind = item.WhichOneof("item") or "unknown"
    if kind == "heartbeat":
        return ": alive\n\n"
    content = json_format.MessageToJson(getattr(item, kind), preserving_proto_field_name=True, indent=None)
    place = f"id: {id_of(item.event.cursor)}\n" if kind == "event" else ""
    return f"{place}event: {kind}\ndata: {content}\n\n"


def id_of(cursor: session_pb2.Cursor) -> str:
    """A cursor as the id of an event."""
    return f"{cursor.log_id}.{cursor.sequence}.{cursor.tag}"


def cursor_of(event_id: str) -> session_pb2.Cursor | None:
    """The cursor that an id is; None for one that is none of ours."""
    log_id, _, rest = event_id.partition(".")
    sequence, _, tag = rest.partition(".")
    return session_pb2.Cursor(log_id=log_id, sequence=int(sequence), tag=tag) if sequence.isdecimal() else None
