"""agentd: a small HTTP daemon in front of any agent that speaks ACP over stdio.

It speaks the dialect of sandbox-agent 0.4.2 and runs inside `local` sandboxes. It imports the standard library and
aiohttp, and nothing else of this project, so that it starts fast and can be copied anywhere.
"""
