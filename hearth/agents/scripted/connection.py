"""JSON-RPC over stdin and stdout, one message a line."""

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

LINE_BYTES = 64 * 1024 * 1024

Object = dict[str, object]
Handler = Callable[[str, Object], Awaitable[Object]]
Listener = Callable[[str, Object], None]


class RpcError(Exception):
    """A JSON-RPC error, given or received."""

    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data

    def to_json(self) -> Object:
        """The error object."""
        error: Object = {"code": self.code, "message": str(self)}
        return error if self.data is None else {**error, "data": self.data}


class Connection:
    """The agent's end. Each request is handled in a task of its own; notifications are handled at once."""

    def __init__(self, handle: Handler, listen: Listener) -> None:
        self._handle = handle
        self._listen = listen
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._pending: dict[int, asyncio.Future[Object]] = {}
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take over stdin and stdout."""
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=LINE_BYTES)
        reading = asyncio.StreamReaderProtocol(self._reader)
        await loop.connect_read_pipe(lambda: reading, sys.stdin)
        writing = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        transport, protocol = await loop.connect_write_pipe(lambda: writing, sys.stdout)
        # Then drain means: the client has it.
        transport.set_write_buffer_limits(high=0)
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)

    async def serve(self) -> None:
        """Read and handle messages until the input ends."""
        while line := await self._reader.readline():
            if not line.strip():
                continue
            try:
                message: object = json.loads(line)
            except ValueError:
                self._write({"jsonrpc": "2.0", "id": None, "error": RpcError(-32700, "Parse error").to_json()})
                continue
            self._dispatch(message if isinstance(message, dict) else {})
            # The request gets to its first wait before the next message is looked at, so a cancel finds its prompt.
            await asyncio.sleep(0)

    async def notify(self, method: str, params: Object) -> None:
        """Send a notification; waits while the client takes nothing."""
        self._write({"jsonrpc": "2.0", "method": method, "params": params})
        await self._writer.drain()

    async def request(self, method: str, params: Object) -> Object:
        """Send a request and wait for its result. Raises RpcError when the client answers with an error."""
        number = self._count
        self._count += 1
        self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            return await self._pending[number]
        finally:
            del self._pending[number]

    async def write_raw(self, data: bytes) -> None:
        """Write bytes that need not be a message."""
        self._writer.write(data)
        await self._writer.drain()

    def _write(self, message: Object) -> None:
        # Not ASCII only: a client must cope with UTF-8, so this agent sends it. A lone surrogate has no UTF-8.
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        self._writer.write(text.encode("utf-8", "replace") + b"\n")

    def _dispatch(self, message: Object) -> None:
        method, params = message.get("method"), message.get("params")
        arguments = params if isinstance(params, dict) else {}
        if isinstance(method, str) and "id" in message:
            task = asyncio.create_task(self._answer(message["id"], method, arguments))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(method, str):
            self._listen(method, arguments)
        elif "result" in message or "error" in message:
            self._settle(message)
        else:
            error = RpcError(-32600, "Invalid request")
            self._write({"jsonrpc": "2.0", "id": None, "error": error.to_json()})

    async def _answer(self, identifier: object, method: str, params: Object) -> None:
        reply: Object = {"jsonrpc": "2.0", "id": identifier}
        try:
            reply["result"] = await self._handle(method, params)
        except RpcError as error:
            reply["error"] = error.to_json()
        except Exception as error:
            # A request without an answer would hang its client.
            logger.exception("request failed")
            reply["error"] = RpcError(-32603, f"Internal error: {error}").to_json()
        self._write(reply)

    def _settle(self, message: Object) -> None:
        number = message.get("id")
        waiting = self._pending.get(number) if isinstance(number, int) else None
        if waiting is None or waiting.done():
            return
        result, error = message.get("result"), message.get("error")
        if isinstance(error, dict):
            code = error.get("code")
            waiting.set_exception(RpcError(code if isinstance(code, int) else -32603, str(error.get("message", ""))))
        else:
            waiting.set_result(result if isinstance(result, dict) else {"value": result})
