"""Write docs/errors.md from the comments of the enum of reasons, so that the page and the contract cannot differ.

`python scripts/generate_docs.py` writes it; `--check` only compares and exits with 1 when it is out of date.
"""

from __future__ import annotations

import importlib.resources
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
SOURCE = "hearth/types/v1/reason.proto"
HEAD = """# Errors

Every error of a Hearth service is a gRPC status with a canonical code, a message that says what to do, and these
details:

| detail | when | holds |
|---|---|---|
| `google.rpc.ErrorInfo` | always | `domain` = `hearth.dev`, `reason` = a name below, `metadata` = ids and numbers |
| `google.rpc.BadRequest` | with `INVALID_ARGUMENT` | each wrong field and what is wrong with it |
| `google.rpc.RetryInfo` | where a retry helps | how long to wait |
| `google.rpc.ResourceInfo` | with `NOT_FOUND` | what was not found |

Retry `UNAVAILABLE` blindly, with backoff; every mutation has a key that makes that safe. The same goes for `CANCELLED`
where you cancelled nothing: gRPC answers that to calls that reach a process while it ends. Retry nothing else without a
change. Failed executions carry one of these names as their `code`. Names that start with "Event" or "Frame" come back
as results of single events and frames, not as errors of a call.

| reason | meaning |
|---|---|
"""


def render() -> str:
    """The page, from the comments in the proto."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "reasons.bin"
        builtin = importlib.resources.files("grpc_tools") / "_proto"
        arguments = ["protoc", f"-I{ROOT / 'protos'}", f"-I{builtin}", "--include_source_info"]
        if protoc.main([*arguments, f"--descriptor_set_out={target}", SOURCE]) != 0:
            raise SystemExit(1)
        files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())
    file = next(file for file in files.file if file.name == SOURCE)
    # A path of [5, enum, 2, value] names a value of an enum in descriptor.proto.
    comments = {
        location.path[3]: " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
        if len(location.path) == 4 and location.path[0] == 5 and location.path[2] == 2
    }
    rows = [
        f"| `{value.name.removeprefix('REASON_')}` | {comments[index]} |"
        for index, value in enumerate(file.enum_type[0].value)
        if value.number != 0
    ]
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    """Write or compare."""
    page = render()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != page:
            raise SystemExit("docs/errors.md is out of date; run python scripts/generate_docs.py")
    else:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
