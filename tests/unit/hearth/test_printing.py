"""What commands print: text once and whole, whatever came of its pieces, and no more when nobody reads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hearth.cli.turns import Printer
from hearth.reducer import Entry

_FOREVER = """
import itertools, typer
from hearth.cli.output import print_json, run

async def forever():
    for number in itertools.count():
        print_json({"number": number})

app = typer.Typer()
app.command()(lambda: run(forever()))
app()
"""


def shown(*entries: Entry, capsys: pytest.CaptureFixture[str]) -> str:
    printer = Printer(quiet=False)
    for entry in entries:
        printer.show(entry)
    return capsys.readouterr().out


def test_text_is_shown_as_it_comes_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = (Entry("m", "agent", "For"), Entry("m", "agent", "Forty-"), Entry("m", "agent", "Forty-two", final=True))
    assert shown(*pieces, capsys=capsys) == "agent Forty-two"


def test_a_message_whose_beginning_was_lost_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Entry("m", "agent", "Forty-two.", final=True)
    assert shown(Entry("m", "agent", "two.", broken=True), whole, capsys=capsys) == "agent Forty-two."
    assert shown(Entry("m", "agent", "two."), whole, capsys=capsys) == "agent two.\nagent Forty-two."


def test_a_program_whose_lines_nobody_reads_any_more_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", _FOREVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b'{"number":0}\n'
        program.stdout.close()
        try:
            assert program.wait(30) == 1
        finally:
            program.kill()
        assert program.stderr is not None
        assert program.stderr.read() == b""
