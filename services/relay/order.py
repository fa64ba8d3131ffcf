"""What one reader gets of a stream of events and frames, in which order, and what it is told that it will not get.

Pure. A reader's `Order` and the pieces that came decide what is written to it; equal orders and equal pieces give equal
bytes, which is what lets a hub do the work once for all readers that stand at the same place.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple


class Role(enum.IntEnum):
    """What an event means to frames."""

    # A fact about the session: frames do not know it.
    SESSION = 0
    # Output of an execution.
    RUNNER = 1
    # An execution began: its frames may follow.
    STARTED = 2
    # An execution ended: no frame of it may follow.
    ENDING = 3


class FrameIn(NamedTuple):
    """Frames `first` to `last` of (execution, epoch), one unless joined. `reply` is the serialized one-item response.

    An empty `reply` stands for frames that this reader is not to get and does not miss.
    """

    execution: str
    epoch: int
    first: int
    last: int
    reply: bytes


class EventIn(NamedTuple):
    """An event. `through` is its frames_through, -1 for none; `completes` the entity it completes, empty for none.

    `tag` is what a cursor says of it.
    """

    sequence: int
    tag: str
    execution: str
    epoch: int
    through: int
    role: Role
    completes: str
    reply: bytes


class Lost(NamedTuple):
    """The reader will not get the frames up to `last` that it does not have yet."""

    execution: str
    epoch: int
    last: int


class Gap(NamedTuple):
    """Tell the reader that it will not get frames `first` to `last`."""

    execution: str
    epoch: int
    first: int
    last: int


class Reset(NamedTuple):
    """Tell the reader that the frames it holds of earlier epochs are void."""

    execution: str
    epoch: int


Piece = FrameIn | EventIn | Lost
Out = FrameIn | EventIn | Gap | Reset


class Order(NamedTuple):
    """Where a reader stands among the frames of the newest execution that its events know.

    `told` is the lowest frame index that was neither delivered nor told as lost, `floor` the lowest that an event did
    not cover yet: a frame below it comes too late. `holds`: frames of this epoch were delivered. `strict`: an event
    tells what is missing before it; while a reader replays what was there before it came, it does not.
    """

    execution: str = ""
    epoch: int = 0
    told: int = 0
    floor: int = 0
    holds: bool = False
    ended: bool = True
    strict: bool = True


class Woven(NamedTuple):
    """What to write, and where the reader stands afterwards."""

    out: list[Out]
    order: Order
    sequence: int


def weave(order: Order, pieces: Iterable[Piece], *, after: int) -> Woven:
    """What a reader at `order` that has the events up to `after` gets of `pieces`, which come in order.

    Events at or below `after` are not repeated, but count. Frames of an execution that is not started, or is over, or
    of a lower epoch, or below an event that covers them, are left out.
    """
    out: list[Out] = []
    for piece in pieces:
        if isinstance(piece, FrameIn):
            order = _frame(order, piece, out)
        elif isinstance(piece, EventIn):
            fresh = piece.sequence > after
            if piece.role is not Role.SESSION:
                order = _event(order, piece, out, fresh=fresh)
            if fresh:
                after = piece.sequence
                out.append(piece)
        elif piece.execution == order.execution and piece.epoch == order.epoch and not order.ended:
            order = _lost(order, piece.last, out)
    return Woven(out, order, after)


def events_of(pieces: Iterable[Piece], *, after: int) -> Woven:
    """The same for a reader that wants no frames."""
    out: list[Out] = [piece for piece in pieces if isinstance(piece, EventIn) and piece.sequence > after]
    last = out[-1] if out else None
    return Woven(out, Order(), last.sequence if isinstance(last, EventIn) else after)


def _frame(order: Order, piece: FrameIn, out: list[Out]) -> Order:
    if order.ended or piece.execution != order.execution or piece.epoch < order.epoch:
        return order
    if piece.epoch > order.epoch:
        order = _raise(order, piece.epoch, out)
    if piece.first < order.told or piece.first < order.floor:
        return order
    if piece.first > order.told:
        order = _lost(order, piece.first - 1, out)
    if not piece.reply:
        return order._replace(told=piece.last + 1)
    out.append(piece)
    # Once for each frame and reader; `_replace` takes three times as long.
    return Order(order.execution, order.epoch, piece.last + 1, order.floor, True, order.ended, order.strict)


def _event(order: Order, piece: EventIn, out: list[Out], *, fresh: bool) -> Order:
    if piece.role is Role.STARTED or (piece.execution != order.execution and piece.epoch > order.epoch):
        order = Order(piece.execution, piece.epoch, ended=False, strict=order.strict)
    elif piece.execution != order.execution or piece.epoch < order.epoch:
        return order
    elif piece.epoch > order.epoch:
        # The ending of a takeover says itself that the run is over; what was shown of it may stay.
        takeover = piece.role is Role.ENDING and piece.through < 0
        order = _raise(order, piece.epoch, [] if takeover else out)
    if piece.through >= 0:
        if order.strict and fresh:
            order = _lost(order, piece.through, out)
        order = order._replace(floor=max(order.floor, piece.through + 1))
    if piece.role is Role.ENDING:
        order = order._replace(ended=True)
    return order


def _raise(order: Order, epoch: int, out: list[Out]) -> Order:
    if order.holds:
        out.append(Reset(order.execution, epoch))
    return order._replace(epoch=epoch, told=0, floor=0, holds=False)


def _lost(order: Order, last: int, out: list[Out]) -> Order:
    if last < order.told:
        return order
    before = out[-1] if out else None
    gap = Gap(order.execution, order.epoch, order.told, last)
    if isinstance(before, Gap) and before[:2] == gap[:2] and before.last + 1 == gap.first:
        out[-1] = before._replace(last=last)
    else:
        out.append(gap)
    return order._replace(told=last + 1)
