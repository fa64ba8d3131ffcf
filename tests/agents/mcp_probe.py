"""An MCP server on stdio with one tool, `echo`: it says what it was given, and the variable PROBE_KEY of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL = {"name": "echo", "description": "Says what it is given.", "inputSchema": TEXT}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    match method:
        case "initialize":
            me = {"name": "probe", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": me}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            text = f"probe heard {params['arguments']['text']} with {os.environ.get('PROBE_KEY', 'no key')}"
            return {"content": [{"type": "text", "text": text}]}
    return {}


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            answer = result(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}), flush=True)


if __name__ == "__main__":
    main()
