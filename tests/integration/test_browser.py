"""The browser of the tests of pages: it runs scripts, tells what they throw, and leaves no process behind."""

from __future__ import annotations

import pytest

from tests.support import processes
from tests.support.browser import page_in_browser


async def fails() -> None:
    async with page_in_browser() as page:
        await page.set_content("<p></p><script>nowhere()</script>")
        assert await page.locator("p").count() == 1


async def test_a_page_runs_its_scripts_and_an_exception_in_it_fails_the_block() -> None:
    async with page_in_browser() as page:
        await page.set_content("<p></p><script>document.querySelector('p').textContent = 1 + 1</script>")
        assert await page.inner_text("p") == "2"
    with pytest.raises(AssertionError, match=r"the page threw: .*nowhere"):
        await fails()
    assert [left for left in processes.left_behind() if "chrom" in left] == []
