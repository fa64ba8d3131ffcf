"""A producer whose memory is its log file: every acknowledgement is on disk before it counts.

`python -m tests.support.ack_producer --history A --relay B --log FILE --sessions N` appends events to N sessions as
fast as they are acknowledged, one JSON line for each acknowledgement, fsynced. SIGTERM ends it after the ending of
each execution is acknowledged; then its exit code is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import uuid
from typing import IO

from hearth.channel import open_channel
from hearth.history.v1 import history_pb2
from hearth.producer import Producer
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from services.chassis.clock import SystemClock

IN_FLIGHT = 16


def record(log: IO[str], session: str, kind: str, event_id: str, result: history_pb2.AppendResult) -> None:
    """One acknowledgement, on disk when this returns."""
    outcome = history_pb2.AppendOutcome.Name(result.outcome).removeprefix("APPEND_OUTCOME_")
    line = {"session": session, "kind": kind, "event_id": event_id, "outcome": outcome, "sequence": result.sequence}
    log.write(json.dumps(line) + "\n")
    log.flush()
    os.fsync(log.fileno())


def message(text: str) -> event_pb2.Event:
    """A message of the agent, with an id of its own."""
    event_id = str(uuid.uuid4())
    body = event_pb2.MessageCompleted(
        message_id=event_id,
        role=content_pb2.ROLE_AGENT,
        content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=text))],
        finish_reason="end",
    )
    return event_pb2.Event(
        event_id=event_id,
        scope=event_pb2.EVENT_SCOPE_RUNNER,
        type="message.completed",
        entity_id=event_id,
        message_completed=body,
    )


def lifecycle(event_type: str, execution_id: str, **body: object) -> event_pb2.Event:
    """Start or ending of an execution."""
    return event_pb2.Event(
        event_id=str(uuid.uuid4()),
        scope=event_pb2.EVENT_SCOPE_RUNNER,
        type=event_type,
        entity_id=execution_id,
        **body,  # type: ignore[arg-type]
    )


async def produce(producer: Producer, project: str, number: int, log: IO[str], done: asyncio.Event) -> None:
    """One execution of one session, from its start to its ending."""
    session, execution_id = f"acks-{number}", str(uuid.uuid4())
    writer = producer.writer(session_pb2.SessionKey(project=project, session=session), execution_id, 1)
    started = lifecycle("execution.started", execution_id, execution_started=event_pb2.ExecutionStarted(agent="test"))
    record(log, session, "started", started.event_id, await writer.event(started))
    count = 0
    while not done.is_set():
        batch = []
        for _ in range(IN_FLIGHT):
            count += 1
            event = message(f"{number}.{count} " + "x" * 250)
            writer.frame(event.entity_id, text_delta=frame_pb2.TextDelta(text=f"{number}.{count} "))
            batch.append((event, writer.event(event)))
        for event, acknowledged in batch:
            record(log, session, "message", event.event_id, await acknowledged)
    ending = lifecycle(
        "execution.completed",
        execution_id,
        execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"),
    )
    record(log, session, "ending", ending.event_id, await writer.ending(ending))


async def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", required=True)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--project", default="acks")
    parser.add_argument("--sessions", type=int, default=4)
    options = parser.parse_args()
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    history, relay = open_channel(options.history), open_channel(options.relay)
    producer = Producer(history=history, relay=relay, clock=SystemClock())
    await producer.start()
    try:
        with open(options.log, "a") as log:
            numbers = range(options.sessions)
            await asyncio.gather(*(produce(producer, options.project, n, log, done) for n in numbers))
    finally:
        await producer.close(5.0)
        await history.close()
        await relay.close()


if __name__ == "__main__":
    asyncio.run(main())
