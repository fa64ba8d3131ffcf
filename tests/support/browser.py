"""A page in a headless Chromium, for what people look at: `async with page_in_browser() as page`.

The browser is the one of the system (`make browser` installs it), driven by the package `playwright`. Every page has a
browser and a profile of its own, and both are gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Error, Page, async_playwright

from tests.support import processes

_ROOT = Path(__file__).resolve().parents[2]
# Pictures of each run, and those that the pages in docs/ show.
TAKEN, SHOWN = _ROOT / "build" / "images", _ROOT / "docs" / "images"
# Set by `make images`: the pictures in docs/ are those of this run from then on.
RENEW = "RENEW_IMAGES"
NAMES = ("chromium", "chromium-browser", "google-chrome")
# No sandbox, as tests often run as root; the rest keeps the browser from talking to anybody but the page's own server.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# For everything that the test waits for in a page; a busy machine draws slowly.
WAIT_MILLISECONDS = 30_000


def executable() -> str:
    """The path of the browser; AssertionError with what to do when there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, "no browser on PATH: run `make browser`, or install the package `chromium`"
    return found


@asynccontextmanager
async def page_in_browser(
    *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1.0
) -> AsyncIterator[Page]:
    """An empty page of `width` times `height` CSS pixels, `scale` device pixels each.

    An exception that a script of the page does not catch fails the block when it ends.
    """
    thrown: list[Error] = []
    with tempfile.TemporaryDirectory(prefix="hearth-browser-", ignore_cleanup_errors=True) as profile:
        async with async_playwright() as playwright:
            context = await playwright.chromium.launch_persistent_context(
                profile,
                executable_path=executable(),
                args=list(FLAGS),
                # Found by the check at the end of the run, should it stay.
                env={**os.environ, processes.MARKER: processes.marker()},
                viewport={"width": width, "height": height},
                device_scale_factor=scale,
                color_scheme="dark" if dark else "light",
                # The same picture on every machine.
                locale="en-GB",
                timezone_id="UTC",
                reduced_motion="reduce",
            )
            try:
                context.set_default_timeout(WAIT_MILLISECONDS)
                page = context.pages[0] if context.pages else await context.new_page()
                page.on("pageerror", lambda error: thrown.append(error))  # noqa: PLW0108 - it marks what it is given
                yield page
            finally:
                await context.close()
    assert thrown == [], f"the page threw: {thrown}"


async def picture(page: Page, name: str) -> bytes:
    """What the page looks like now, as PNG: `name` in build/images, and in docs/images where it is missing there or is
    to be renewed. Every run would differ in times, and a run of the tests changes no file that is kept."""
    taken = await page.screenshot(animations="disabled")
    for folder in (TAKEN, SHOWN):
        path = folder / name
        if folder == TAKEN or not path.exists() or os.environ.get(RENEW):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(taken)
    return taken
