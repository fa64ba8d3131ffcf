"""`/v1/fs`: files and directories of the sandbox, as far as attachments need them.

Paths are absolute, or relative to HOME. Nothing is fenced off here: whoever has the token may also start processes.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

from aiohttp import web

from services.sandbox.agentd.problems import Problem, invalid_request

FILE_BYTES = 64 * 1024 * 1024

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [
        web.get("/v1/fs/file", read_file),
        web.put("/v1/fs/file", write_file),
        web.delete("/v1/fs/file", delete_entry),
        web.delete("/v1/fs/entry", delete_entry),
        web.post("/v1/fs/mkdir", make_directory),
        web.get("/v1/fs/entries", list_entries),
        web.get("/v1/fs/stat", stat_entry),
    ]


async def read_file(request: web.Request) -> web.StreamResponse:
    """GET file?path= → the bytes."""
    path = _path(request)
    if not await _in_thread(path.is_file):
        raise _not_found(path) if not await _in_thread(path.exists) else invalid_request(f"path is not a file: {path}")
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


async def write_file(request: web.Request) -> web.Response:
    """PUT file?path=, body = the bytes → `{path, bytesWritten}`. Parents are made; a reader sees the old file or the
    whole new one. 413 above 64 MiB."""
    path = _path(request)
    content = bytearray()
    async for chunk in request.content.iter_any():
        content += chunk
        if len(content) > FILE_BYTES:
            raise Problem(413, "payload_too_large", f"payload too large: at most {FILE_BYTES} bytes")
    await _in_thread(_replace, path, content)
    return web.json_response({"path": str(path), "bytesWritten": len(content)})


async def delete_entry(request: web.Request) -> web.Response:
    """DELETE entry?path= (a file or an empty directory) → `{path}`."""
    path = _path(request)
    await _in_thread(_delete, path)
    return web.json_response({"path": str(path)})


async def make_directory(request: web.Request) -> web.Response:
    """POST mkdir?path= → `{path}`; parents are made, an existing directory is fine."""
    path = _path(request)
    await _in_thread(_make_directory, path)
    return web.json_response({"path": str(path)})


async def list_entries(request: web.Request) -> web.Response:
    """GET entries?path= → list of `{name, path, entryType, size, modified}` by name; HOME when no path is given."""
    path = _path(request, default=".")
    return web.json_response(await _in_thread(_entries, path))


async def stat_entry(request: web.Request) -> web.Response:
    """GET stat?path= → `{path, entryType: file | directory, size (bytes), modified (RFC 3339)}`."""
    path = _path(request)
    return web.json_response(await _in_thread(_describe, path))


def _path(request: web.Request, default: str | None = None) -> Path:
    text = request.query.get("path") or default
    if text is None:
        raise invalid_request("missing query parameter 'path'")
    if "\0" in text:
        raise invalid_request("query parameter 'path' contains a NUL character")
    return Path(os.path.normpath(Path.home() / text))


async def _in_thread(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Run blocking file work off the loop; what the disk refuses is the caller's error."""
    try:
        return await asyncio.to_thread(work, *arguments, **options)
    except FileNotFoundError as error:
        raise invalid_request(f"path not found: {error.filename}") from None
    except OSError as error:
        raise invalid_request(f"{(error.strerror or 'input/output error').lower()}: {error.filename}") from None


def _replace(path: Path, content: bytearray) -> None:
    if path.is_dir():
        raise IsADirectoryError(0, "path is a directory", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _entries(path: Path) -> list[dict[str, object]]:
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(0, "path is not a directory", str(path))
    return [{"name": name, **_describe(path / name)} for name in sorted(os.listdir(path))]


def _describe(path: Path) -> dict[str, object]:
    # A link whose target is missing still is an entry, and can be deleted.
    stat = path.stat() if path.exists() else path.lstat()
    return {
        "path": str(path),
        "entryType": "directory" if path.is_dir() else "file",
        "size": stat.st_size,
        "modified": datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(),
    }


def _not_found(path: Path) -> Problem:
    return invalid_request(f"path not found: {path}")
