"""The exception tree: what a status carries comes back whole, and every foreign error has its place."""

from __future__ import annotations

import asyncpg
import grpc
import grpc.aio
import pytest
import redis.exceptions
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from hearth.types.v1 import reason_pb2, session_pb2
from services.chassis import errors
from services.chassis.errors import DETAILS_KEY, HearthError, as_hearth_error, from_rpc_error

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HearthError)]


def over_the_wire(error: HearthError) -> HearthError:
    status = error.to_status()
    trailing = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    rpc_error = grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), trailing, details=error.message)
    return from_rpc_error(rpc_error)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not HearthError])
def test_each_class_comes_back_as_itself(kind: type[HearthError]) -> None:
    assert type(over_the_wire(kind("m", reason="FENCED"))) is kind


def test_one_class_for_each_code() -> None:
    codes = {kind.code for kind in KINDS if kind is not HearthError}
    # OK is no error, and UNKNOWN is what gRPC makes of an error that nobody mapped.
    assert codes == set(grpc.StatusCode) - {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN}


text = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    message=text,
    reason=text.filter(bool),
    metadata=st.dictionaries(text, text, max_size=3),
    violations=st.lists(st.tuples(text, text), max_size=3),
    retry_after=st.none() | st.floats(0, 86_400).map(lambda seconds: round(seconds, 3)),
    resource=st.none() | st.tuples(text, text, text),
)
def test_everything_it_carries_comes_back(
    message: str,
    reason: str,
    metadata: dict[str, str],
    violations: list[tuple[str, str]],
    retry_after: float | None,
    resource: tuple[str, str, str] | None,
) -> None:
    sent = errors.Unavailable(
        message,
        reason=reason,
        metadata=metadata,
        field_violations=violations,
        retry_after=retry_after,
        resource=resource,
    )
    got = over_the_wire(sent)
    assert (got.reason, got.metadata, got.field_violations) == (reason, metadata, tuple(violations))
    assert got.resource == sent.resource
    assert got.message == message or not message
    assert got.retry_after == (None if retry_after is None else pytest.approx(retry_after, abs=1e-9))


def test_further_details_come_back() -> None:
    cursor = session_pb2.Cursor(log_id="l", sequence=7, tag="t")
    got = over_the_wire(errors.Unavailable("slow", reason="SLOW_READER", details=[cursor]))
    assert got.detail(session_pb2.Cursor) == cursor
    assert got.detail(session_pb2.SessionKey) is None


@pytest.mark.parametrize("letter", ["x", "ä", "火", "🔥"])
def test_an_error_fits_into_headers_whatever_it_is_about(letter: str) -> None:
    long = letter * 100_000
    wrong = tuple((f"answers[{number}].interaction_id{long}", long) for number in range(5_000))
    sent = errors.InvalidArgument(
        long, reason="INVALID_FIELD", metadata={"project": long}, field_violations=wrong, resource=("log", long, long)
    )
    status = sent.to_status()
    # The text is a header of its own, in which each byte may take three.
    assert len(status.SerializeToString()) * 4 / 3 + 3 * len(status.message.encode()) < 10_000
    got = over_the_wire(sent)
    assert (type(got), got.reason) == (errors.InvalidArgument, "INVALID_FIELD")
    assert got.message.startswith(letter * 100)
    assert got.metadata["project"].endswith(f"{letter}…")
    *told, (field, more) = got.field_violations
    assert [name.partition(".")[0] for name, _ in told] == [f"answers[{number}]" for number in range(len(told))]
    assert (field, more) == ("", f"{5_000 - len(told)} more of such problems")


def test_status_has_the_domain_and_only_what_was_given() -> None:
    status = errors.NotFound("gone", reason="SESSION_NOT_FOUND").to_status()
    assert len(status.details) == 1
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("hearth.dev", "SESSION_NOT_FOUND")


def test_status_that_is_not_ours() -> None:
    bare = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "GOAWAY")
    got = from_rpc_error(bare)
    assert (type(got), got.reason, got.message) == (errors.Unavailable, "UNSPECIFIED", "GOAWAY")
    broken = grpc.aio.AioRpcError(
        grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff")), "?"
    )
    assert type(from_rpc_error(broken)) is errors.Internal


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.ConnectionDoesNotExistError("x"),
        asyncpg.InterfaceError("pool is closing"),
        asyncpg.InterfaceError("cannot call Connection.fetch(): connection has been released back to the pool"),
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
        asyncpg.CannotConnectNowError("starting up"),
        asyncpg.AdminShutdownError("x"),
        asyncpg.QueryCanceledError("statement timeout"),
        asyncpg.LockNotAvailableError("lock timeout"),
        asyncpg.TooManyConnectionsError("x"),
        redis.exceptions.ConnectionError("x"),
        redis.exceptions.TimeoutError("x"),
        redis.exceptions.BusyLoadingError("x"),
        TimeoutError(),
        ConnectionRefusedError(),
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()),
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_dependency_that_is_away_is_worth_a_retry(error: Exception) -> None:
    seen = as_hearth_error(error)
    assert isinstance(seen, errors.Unavailable)
    assert seen.reason == "DEPENDENCY_UNAVAILABLE"
    assert seen.retry_after is not None


@pytest.mark.parametrize(
    "state",
    [
        *("08000", "08001", "08003", "08004", "08006", "08007", "08P01"),
        *("53000", "53100", "53200", "53300", "53400"),
        *("57000", "57014", "57P01", "57P02", "57P03", "57P04", "57P05"),
        *("58000", "58030", "58P01", "58P02"),
        *("25006", "25P03", "25P04", "40001", "40P01", "55P03"),
    ],
)
def test_a_server_that_is_not_able_to_work_now_is_worth_a_retry(state: str) -> None:
    error = asyncpg.PostgresError.new({"C": state, "M": "x"})
    assert error.sqlstate == state
    seen = as_hearth_error(error)
    assert isinstance(seen, errors.Unavailable)
    assert seen.metadata == {"dependency": "Postgres"}


@pytest.mark.parametrize("state", ["25P02", "42P01", "XX000", "XX001"])
def test_a_server_that_finds_something_broken_is_a_defect(state: str) -> None:
    assert as_hearth_error(asyncpg.PostgresError.new({"C": state, "M": "x"})) is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        asyncpg.UniqueViolationError("x"),
        asyncpg.UndefinedTableError("x"),
        redis.exceptions.ResponseError("x"),
        asyncpg.InterfaceError("the server expects 1 argument for this query, 0 was passed"),
        # Another service calls our request wrong: that is our defect, not one of whoever called us.
        grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), grpc.aio.Metadata()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_defect_is_not_dressed_up(error: Exception) -> None:
    assert as_hearth_error(error) is None


def test_errors_of_a_task_group() -> None:
    known = errors.NotFound("gone", reason="SESSION_NOT_FOUND")
    assert as_hearth_error(ExceptionGroup("g", [known])) is known
    assert as_hearth_error(ExceptionGroup("g", [ExceptionGroup("h", [TimeoutError()])])) is not None
    assert as_hearth_error(ExceptionGroup("g", [known, ValueError()])) is None


def test_what_is_not_built_says_so() -> None:
    seen = as_hearth_error(NotImplementedError("Method not implemented!"))
    assert isinstance(seen, errors.Unimplemented)
    assert seen.reason == "NOT_IMPLEMENTED"


def test_own_reasons_exist() -> None:
    names = {name.removeprefix("REASON_") for name in reason_pb2.Reason.DESCRIPTOR.values_by_name}
    made = [
        errors.invalid("f", "d"),
        errors.not_implemented("x"),
        errors.dependency_unavailable("x"),
        errors.internal(),
        from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata())),
    ]
    assert {error.reason for error in made} <= names


def test_details_survive_the_way_grpc_carries_them() -> None:
    status = errors.invalid("session.project", "must not be empty").to_status()
    assert status_pb2.Status.FromString(status.SerializeToString()) == status
