"""The file API of a toolbox. Relative paths are below the sandbox's home, absolute ones are this machine's."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from aiohttp import BodyPartReader, web

from tests.support.daytona.problems import DAEMON, Problem, dumps, timestamp
from tests.support.daytona.sandbox import Sandbox
from tests.support.daytona.serving import Gate, Handler, body_of, reply
from tests.support.daytona.toolbox import Toolboxes

_CHUNK = 64 * 1024


class FileApi:
    """Handlers of files."""

    def __init__(self, toolboxes: Toolboxes) -> None:
        self._toolboxes = toolboxes

    def routes(self, gate: Gate) -> Sequence[web.RouteDef]:
        """Its routes, below the prefix of a toolbox."""

        def upload(handler: Handler) -> Handler:
            return gate.guard("upload", handler, source=DAEMON, classes=())

        def download(handler: Handler, *, streams: bool = False) -> Handler:
            return gate.guard("download", handler, source=DAEMON, classes=(), streams=streams)

        return [
            web.post("/files/bulk-upload", upload(self._upload_many)),
            web.post("/files/upload-v2", upload(self._upload)),
            web.post("/files/bulk-download", download(self._download_many)),
            web.get("/files/download", download(self._download)),
            web.get("/files", download(self._list)),
            web.get("/files/info", download(self._info)),
            web.post("/files/folder", upload(self._make_folder)),
            web.delete("/files", upload(self._delete)),
            web.post("/files/move", upload(self._move)),
            web.post("/files/permissions", upload(self._permissions)),
        ]

    async def _upload_many(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        paths: dict[str, str] = {}
        try:
            async for part in await request.multipart():
                assert isinstance(part, BodyPartReader)
                index, _, field = (part.name or "").partition(".")
                if field == "path":
                    paths[index] = await part.text()
                elif field == "file":
                    target = paths.get(index) or unquote(part.filename or "")
                    await _write(_path(found, target), _chunks(part))
        except (OSError, ValueError) as error:
            return reply({"errors": [str(error)]}, 400)
        return web.Response()

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        target = _path(self._toolboxes.sandbox(request), request.query.get("path", ""))
        await _told(_write(target, request.content.iter_chunked(_CHUNK)))
        return web.Response()

    async def _download_many(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        boundary = f"DAYTONA-FILE-BOUNDARY-{uuid4().hex}"
        body = b""
        for source in (await body_of(request)).get("paths") or []:
            name, kind = "file", "application/octet-stream"
            try:
                content = _path(found, source).read_bytes()
            except OSError as error:
                problem = _problem(error)
                name, kind = "error", "application/json"
                content = dumps(problem.body(request.method, request.path)).encode()
            body += (
                (
                    f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{_quoted(source)}"; '
                    f"filename*=UTF-8''{quote(source, safe='')}\r\n"
                    f"Content-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
                ).encode()
                + content
                + b"\r\n"
            )
        body += f"--{boundary}--\r\n".encode()
        return web.Response(body=body, headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        try:
            content = self._named(request).read_bytes()
        except OSError as error:
            raise _problem(error) from error
        return web.Response(body=content, content_type="application/octet-stream")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        directory = _path(self._toolboxes.sandbox(request), request.query.get("path", ""))
        try:
            return reply([_shown(path) for path in sorted(directory.iterdir())])
        except OSError as error:
            raise _problem(error) from error

    async def _info(self, request: web.Request) -> web.StreamResponse:
        try:
            return reply(_shown(self._named(request)))
        except OSError as error:
            raise _problem(error) from error

    async def _make_folder(self, request: web.Request) -> web.StreamResponse:
        try:
            path = self._named(request)
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(int(request.query.get("mode") or "755", 8))
        except OSError as error:
            raise _problem(error) from error
        return web.Response(status=201)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        path = self._named(request)
        try:
            if not path.is_dir() or path.is_symlink():
                path.unlink()
            elif request.query.get("recursive") == "true":
                shutil.rmtree(path)
            else:
                raise Problem(400, "cannot delete directory without recursive flag", source=DAEMON)
        except OSError as error:
            raise _problem(error) from error
        return web.Response(status=204)

    async def _move(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        source, target = (_path(found, request.query.get(name, "")) for name in ("source", "destination"))
        try:
            if target.exists():
                raise Problem(409, "destination already exists", source=DAEMON)
            source.rename(target)
        except OSError as error:
            raise _problem(error) from error
        return web.Response()

    async def _permissions(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.query.get("mode"):
                self._named(request).chmod(int(request.query["mode"], 8))
        except OSError as error:
            raise _problem(error) from error
        return web.Response()

    def _named(self, request: web.Request) -> Path:
        text = request.query.get("path", "")
        if not text:
            raise Problem(400, "path is required", code="INVALID_FILE_PATH", source=DAEMON)
        return _path(self._toolboxes.sandbox(request), text)


def _path(found: Sandbox, text: str) -> Path:
    return found.home / text.removeprefix("~/")


async def _chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    while chunk := await part.read_chunk(_CHUNK):
        yield chunk


async def _write(path: Path, chunks: AsyncIterator[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with draft.open("wb") as file:
            async for chunk in chunks:
                file.write(chunk)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


async def _told(work: Any) -> None:
    try:
        await work
    except OSError as error:
        raise _problem(error) from error


def _problem(error: OSError) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(404, f"file not found: {error.filename}", code="FILE_NOT_FOUND", source=DAEMON)
    if isinstance(error, PermissionError):
        return Problem(403, f"permission denied: {error.filename}", code="FILE_ACCESS_DENIED", source=DAEMON)
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        return Problem(400, f"invalid file path: {error.filename}", code="INVALID_FILE_PATH", source=DAEMON)
    return Problem(500, str(error), code="FILE_READ_FAILED", source=DAEMON)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _shown(path: Path) -> dict[str, Any]:
    status = os.lstat(path)
    modified = timestamp(status.st_mtime)
    return {
        "name": path.name,
        "path": str(path),
        "isDir": path.is_dir(),
        "size": status.st_size,
        "mode": stat.filemode(status.st_mode),
        "permissions": f"{stat.S_IMODE(status.st_mode):04o}",
        "modTime": modified,
        "modifiedAt": modified,
        "owner": _name(pwd.getpwuid, status.st_uid),
        "group": _name(grp.getgrgid, status.st_gid),
    }


def _name(look_up: Any, number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)
