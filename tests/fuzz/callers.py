"""Who makes the calls of a fuzz run: tokens of several kinds, and what hostile callers send beside a message."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.chassis.auth import ANY_PROJECT, hash_token
from services.chassis.scopes import SCOPE_NAMES
from tests.fuzz.messages import PROJECT

OTHER_PROJECT = "other"
OPERATOR = "token-of-the-operator"
_MEMBER, _STRANGER, _READER = "token-of-the-project", "token-of-another-project", "token-that-reads"

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """One kind of caller. `project` is empty where no call may succeed; `share` is how many of all calls it makes."""

    project: str
    scopes: Sequence[str]
    share: float
    tokens: Sequence[str]


CALLERS = (
    Caller(ANY_PROJECT, SCOPE_NAMES, 0.55, (f"Bearer {OPERATOR}",)),
    Caller(PROJECT, SCOPE_NAMES, 0.2, (f"Bearer {_MEMBER}", f"bearer  {_MEMBER} ")),
    Caller(OTHER_PROJECT, SCOPE_NAMES, 0.12, (f"Bearer {_STRANGER}",)),
    Caller(PROJECT, ("read",), 0.05, (f"Bearer {_READER}",)),
    Caller(
        "",
        (),
        0.08,
        (
            "",
            "Bearer",
            "Bearer ",
            "Bearer a b",
            f"Basic {OPERATOR}",
            OPERATOR,
            f"Bearer {OPERATOR.upper()}",
            "Bearer \x7e\x21" + "a" * 2_000,
            "Bearer " + "a" * 7_000,
        ),
    ),
)

_ANOTHER_TOKEN: Metadata = (("authorization", f"Bearer {_STRANGER}"),)
# What stands beside the token. A server takes about 8 KiB of it, and refuses what is over 16 KiB.
_BESIDE: tuple[Metadata, ...] = (
    (("traceparent", "00-zz-zz-01"),),
    (("traceparent", "00-" + "f" * 32 + "-" + "f" * 16 + "-ff"),),
    (("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-00"),),
    (("traceparent", "01-" + "a" * 32 + "-" + "b" * 16 + "-01-" + "c" * 500),),
    (("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"), ("tracestate", "a" * 600)),
    (
        ("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
        ("tracestate", ",".join(f"k{n}=v" for n in range(99))),
    ),
    (("baggage", "a=%ff;=;,,=b,c=" + "%00" * 500),),
    (("baggage", ",".join(f"key{n}=value" for n in range(200))),),
    (("grpc-timeout-of-mine", "1n"),),
    (("x-bin", b"\x00\xff" * 50), ("authorization-bin", b"\xff")),
    (("traceparent-bin", b"\x00"), ("grpc-trace-bin", b"\x00" * 29), ("grpc-tags-bin", b"\xff" * 9)),
    (("grpc-status-details-bin", b"\xff" * 40),),
    (("user-agent", "x" * 1_000), ("host", "..")),
    (("x-huge", "a" * 12_000),),
    (("x-huge", "a" * 100_000),),
    tuple((f"x-{number}", "b" * 20) for number in range(400)),
    _ANOTHER_TOKEN,
)


def tokens() -> dict[str, dict[str, Any]]:
    """The file of tokens, by hash."""
    entries = (
        (OPERATOR, "operator", ANY_PROJECT, SCOPE_NAMES),
        (_MEMBER, "member", PROJECT, SCOPE_NAMES),
        (_STRANGER, "stranger", OTHER_PROJECT, SCOPE_NAMES),
        (_READER, "reader", PROJECT, ("read",)),
    )
    return {
        hash_token(token): {"name": name, "project": project, "scopes": list(scopes)}
        for token, name, project, scopes in entries
    }


def choose(chance: random.Random, callers: Sequence[Caller] = CALLERS) -> Caller:
    """Some caller, each as often as its share says."""
    return chance.choices(callers, [caller.share for caller in callers])[0]


def metadata(caller: Caller, chance: random.Random) -> Metadata:
    """What a call of `caller` carries."""
    token = chance.choice(caller.tokens)
    own: Metadata = (("authorization", token),) if token else ()
    beside = chance.choice(_BESIDE) if chance.random() < 0.1 else ()
    # Alone it would be no second token, but that of another caller.
    return own if not token and beside is _ANOTHER_TOKEN else own + beside


def laden(metadata: Metadata) -> bool:
    """Whether that is more than gRPC is sure to take."""
    # Each entry counts 32 bytes more.
    return sum(len(key) + len(value) + 32 for key, value in metadata) > 7_000


def environment(auth_file: str) -> dict[str, str]:
    """Settings of a stack that knows these callers. The operator is every service, too."""
    return {
        "HEARTH_AUTH_FILE": auth_file,
        "HEARTH_TOKEN": OPERATOR,
        # Low enough that the callers of a project reach it.
        "HEARTH_PROJECT_RATE": "20",
        "HEARTH_PROJECT_STREAMS": "2",
        # Long streams are looked at again while they are open.
        "HEARTH_AUTH_RECHECK": "0.2",
    }
