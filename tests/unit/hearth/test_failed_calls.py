"""Failed calls have the class of their code, and a token that is a function is asked each time."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from hearth import errors
from hearth.channel import token_of


def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        # Of a code that Hearth does not use, only what is common to all is known.
        (grpc.StatusCode.UNKNOWN, errors.CallError),
    ],
)
def test_each_code_has_its_class(code: grpc.StatusCode, kind: type[errors.CallError]) -> None:
    read = errors.read_error(failed(code))
    assert type(read) is kind
    assert (read.code, read.message) == (code, "why")


def test_what_was_read_is_read_no_further() -> None:
    read = errors.read_error(failed(grpc.StatusCode.ABORTED))
    assert errors.read_error(read) is read


async def test_an_answer_is_given_and_a_failure_raised_by_class() -> None:
    async def call(problem: grpc.aio.AioRpcError | None) -> str:
        if problem is not None:
            raise problem
        return "answer"

    assert await errors.answered(call(None)) == "answer"
    with pytest.raises(errors.OutOfRange):
        await errors.answered(call(failed(grpc.StatusCode.OUT_OF_RANGE)))


def test_a_token_may_change() -> None:
    told = iter(["first", "second"])
    assert [token_of(lambda: next(told)).reveal() for _ in range(2)] == ["first", "second"]
    assert token_of("fixed").reveal() == "fixed"
