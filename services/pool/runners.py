"""The runner port: telling whoever drives a session that rows of it wait, in this process or in another one.

A nudge is a hint and one hop long. Its receipt says what may be expected of it; it never fails what was asked for,
because that is in the rows, and holders read theirs every second anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple, TypeAlias

import grpc.aio

from hearth.pool.v1 import pool_pb2, replica_service_pb2, replica_service_pb2_grpc
from services.chassis.errors import Unavailable, as_hearth_error
from services.pool.rows import Key

logger = logging.getLogger(__name__)

# A holder that does not answer in this time is frozen, gone or cut off; it is not waited for.
NUDGE_SECONDS = 1.0

Reason: TypeAlias = "pool_pb2.NudgeReason.ValueType"


class Receipt(StrEnum):
    """What became of a nudge."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    NOT_HELD = "NOT_HELD"
    UNREACHABLE = "UNREACHABLE"

    @property
    def reached(self) -> bool:
        """Whether the runner will look, or did."""
        return self in {Receipt.ACCEPTED, Receipt.DUPLICATE}


class Unpicked(NamedTuple):
    """An execution that waits to be picked up, and who holds its session."""

    key: Key
    execution_id: str
    holder: str | None


@dataclass(frozen=True, slots=True)
class Standing:
    """Who has a session, and the execution that has not ended: `pending` before its prompt, `ending` once the pool
    itself ends it."""

    holder: str | None
    epoch: int
    execution_id: str | None = None
    driver: str | None = None
    pending: bool = False
    ending: bool = False


class Place(Enum):
    """Where the next step of a session is made."""

    HERE = "HERE"
    # Somebody else drives it: what waits is told and done there.
    THERE = "THERE"
    # Somebody else has its agent, and should pick up what waits.
    OFFERED = "OFFERED"
    # Nothing is to be driven; its facts are told by whoever made them.
    NOWHERE = "NOWHERE"


def place(standing: Standing | None, me: str) -> Place:
    """Where the next step of a session is made, as `me` sees it."""
    if standing is None or standing.execution_id is None or standing.ending:
        return Place.NOWHERE
    if standing.driver is not None:
        return Place.HERE if standing.driver == me else Place.THERE
    if not standing.pending:
        return Place.NOWHERE
    return Place.HERE if standing.holder in {None, me} else Place.OFFERED


def whom_to_tell(standing: Standing | None, me: str) -> str | None:
    """The replica that should look at the session too, None if nobody else has to do with it.

    Also the holder of an execution that the pool ends: it may be driving it still, and not know.
    """
    if standing is None or standing.execution_id is None:
        return None
    other = standing.driver or standing.holder
    return other if other != me else None


class Runners:
    """Nudges by address. `here` is the runner of this process, `address` finds that of another one."""

    def __init__(
        self,
        holder: str,
        *,
        here: Callable[[Key, int, Reason], Receipt],
        address: Callable[[str], Awaitable[str | None]],
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._holder = holder
        self._here = here
        self._address = address
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def nudge(self, holder: str, key: Key, epoch: int, reason: Reason) -> Receipt:
        """Tell a holder that rows of a session wait, at its newest epoch."""
        if holder == self._holder:
            return self._here(key, epoch, reason)
        try:
            receipt = await self._nudge(holder, key, epoch, reason)
        except Exception as error:
            if not isinstance(as_hearth_error(error), Unavailable):
                raise
            receipt = Receipt.UNREACHABLE
        if not receipt.reached:
            about = {"session": str(key), "holder": holder, "receipt": str(receipt)}
            logger.info("nudge was not taken", extra=about)
        return receipt

    async def close(self) -> None:
        """Close the connections."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    async def _nudge(self, holder: str, key: Key, epoch: int, reason: Reason) -> Receipt:
        address = await self._address(holder)
        if address is None:
            await self._forget(holder)
            return Receipt.UNREACHABLE
        channel = self._channels.get(holder)
        if channel is None:
            channel = self._channels[holder] = self._connect(address)
        request = replica_service_pb2.NudgeRequest(session=key.message(), epoch=epoch, reason=reason, holder=holder)
        stub = replica_service_pb2_grpc.ReplicaServiceStub(channel)
        try:
            answer = await stub.Nudge(request, timeout=NUDGE_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.info("holder does not answer", extra={"holder": holder, "cause": error.code().name})
            return Receipt.UNREACHABLE
        found = pool_pb2.NudgeReceipt.Name(answer.receipt).removeprefix("NUDGE_RECEIPT_")
        return Receipt(found) if found in Receipt.__members__ else Receipt.NOT_HELD

    async def _forget(self, holder: str) -> None:
        channel = self._channels.pop(holder, None)
        if channel is not None:
            # With time for the calls that are open: one that is cut off looks cancelled to whoever waits for it.
            await channel.close(2 * NUDGE_SECONDS)


def message(receipt: Receipt) -> replica_service_pb2.NudgeResponse:
    """A receipt as the contract has it."""
    return replica_service_pb2.NudgeResponse(receipt=pool_pb2.NudgeReceipt.Value(f"NUDGE_RECEIPT_{receipt}"))
