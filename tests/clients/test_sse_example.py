"""The example of a web application, in a browser: text as it comes, over a bridge and a relay that are killed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from playwright.async_api import Page, expect

import hearth
from hearth.embedded.daemons import free_port
from tests.contract.pool.house import House
from tests.support import processes
from tests.support.browser import page_in_browser, picture

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def bridge(addresses: hearth.Addresses, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The application as a process, killed at the end."""
    where = {f"HEARTH_{name.upper()}_ADDRESS": getattr(addresses, name) for name in addresses.__slots__}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "uvicorn", "examples.fastapi_sse.app:app", "--port", str(port), "--log-level", "error"),
        cwd=ROOT,
        env={**os.environ, **where, processes.MARKER: processes.marker()},
    )
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                assert process.returncode is None
                try:
                    async with http.get(f"http://127.0.0.1:{port}/") as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send").click()


async def test_a_browser_sees_one_conversation_over_broken_connections(
    house: House, client: hearth.Client, addresses: hearth.Addresses
) -> None:
    session, port = f"sse-{uuid.uuid4().hex[:8]}", free_port()
    url = f"http://127.0.0.1:{port}/?session={session}"
    async with page_in_browser(width=900, height=760) as page:
        async with bridge(addresses, port):
            await page.goto(url)
            await say(page, 'tool search {"for": "hearths"}')
            await expect(page.locator("#state")).to_have_text("completed")
            await say(page, "stream 300 words at 60/s")
            await expect(page.locator("article.preview")).to_contain_text(" ")
            # First the bridge dies, then, behind a new one, the relay: both in the middle of the answer.
        async with bridge(addresses, port):
            await expect(page.locator("article.agent.preview")).to_contain_text(" ")
            relay = house.processes["relay"]
            relay.kill9()
            await relay.restart()
            await expect(page.locator("article.preview")).to_have_count(0)
            await expect(page.locator("#state")).to_have_text("completed")
            key = hearth.session_key("demo", session)
            log = [item async for item in client.history(key)]
            assert await page.evaluate("seen.sequences") == [item.cursor.sequence for item in log]
            assert await page.evaluate("seen.streams") >= 2
            messages = [item.event.message_completed for item in log if item.event.HasField("message_completed")]
            shown = await page.locator("article:not(.tool)").all_text_contents()
            assert shown == [hearth.text_of(message.content) for message in messages]
            assert await page.locator("article.tool").count() == 1

            await say(page, "stream 3000 words at 30/s")
            await expect(page.locator("article.agent.preview")).to_contain_text("word-40 ")
            await picture(page, "sse.png")
            await page.get_by_role("button", name="Stop").click()
            await expect(page.locator("#state")).to_have_text("stopped")
            # Another tab sees the same.
            whole = await page.locator("article").all_text_contents()
            await page.goto(url)
            await expect(page.locator("article")).to_have_count(len(whole))
            assert await page.locator("article").all_text_contents() == whole


async def test_a_refusal_is_told_by_its_reason(addresses: hearth.Addresses) -> None:
    port = free_port()
    async with bridge(addresses, port), aiohttp.ClientSession() as http:
        sent = {"text": "", "request_id": "r1"}
        async with http.post(f"http://127.0.0.1:{port}/sessions/x/messages", json=sent) as answer:
            assert answer.status == 400
            assert (await answer.json())["reason"] == "INVALID_FIELD"
        where, headers = f"http://127.0.0.1:{port}/sessions/never/events", {"Last-Event-ID": f"{uuid.uuid4()}.9.00"}
        async with http.get(where, headers=headers) as answer:
            told = (await answer.content.readuntil(b"}\n\n")) + await answer.content.readuntil(b"}\n\n")
        assert re.search(rb'event: refused\ndata: \{"reason": "[A-Z_]+"\}', told), told
