"""Files below an agent's HOME that hold logins. What an agent remembers outlives its sandbox; these must not."""

from __future__ import annotations

from typing import Final

# Of agents that are known to write them. A deployment adds its own by `auth_paths` in HEARTH_AGENTS.
AUTH_PATHS: Final = (
    ".codex/auth.json",
    ".claude/.credentials.json",
    ".pi/agent/auth.json",
    ".local/share/opencode/auth.json",
    ".gemini/oauth_creds.json",
    ".qwen/oauth_creds.json",
    ".vibe/.env",
)
