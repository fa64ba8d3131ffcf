"""A turn in the terminal: text as it streams, tools, what is asked, and how it ended."""

from __future__ import annotations

from rich.markup import escape

from hearth.cli.output import as_dict, out, print_json
from hearth.client import Client
from hearth.reducer import Entry, Transcript, ending_summary, is_ending
from hearth.types.v1 import event_pb2, session_pb2

_PROMPT = "prompt"
HOW_COLOURS = {"warm": "green", "restarted": "yellow", "cold": "blue"}


async def follow_turn(
    client: Client,
    key: session_pb2.SessionKey,
    execution_id: str,
    *,
    after: session_pb2.Cursor | None,
    input_id: str = "",
    over: str = "",
    quiet: bool = False,
    json: bool = False,
) -> str:
    """Show one execution until it ends, `json`: each item as received; gives its outcome, as `completed`.

    Without an execution it is the one that runs `input_id`, once there is one; `removed` when that input was taken out.
    `over` is the outcome of one that has ended, whose events the log may not hold any more.
    """
    view = Transcript()
    printer = Printer(quiet or json)
    async for item in client.watch(key, after=after):
        if json:
            print_json(as_dict(item))
        changed = view.apply(item)
        event = item.event.event
        # Before it another turn may run.
        if execution_id and execution_id in (event.execution_id, item.frame.execution_id):
            if changed is not None:
                printer.show(changed)
            if event.HasField("interaction_requested"):
                printer.ask(event.interaction_requested)
        if event.HasField("input_promoted") and event.input_promoted.input_id == input_id:
            execution_id = event.input_promoted.execution_id
        if event.HasField("input_removed") and event.input_removed.input_id == input_id:
            return "removed"
        if is_ending(event.type) and event.execution_id == execution_id:
            printer.end(event)
            return event.type.removeprefix("execution.")
        if over and item.HasField("ready"):
            return over
    raise AssertionError("a watch ends only when it is left")


class Printer:
    """Prints what is new of each entry, so that text appears as it streams and only once. `quiet` prints nothing."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._printed: dict[str, str] = {}
        self._current = ""

    def show(self, entry: Entry) -> None:
        """What changed of an entry; what users say is not shown, as whoever sent it has seen it."""
        if self._quiet or entry.kind == "user":
            return
        name = f"{entry.execution_id} {entry.entity_id}"
        if entry.kind == "tool":
            # At once when it begins; again only when it did not do what it should.
            begun = name in self._printed
            if begun and not (entry.final and entry.status != "succeeded"):
                return
            self._printed[name] = ""
            self._begin(name, "")
            self._current = ""
            shown = f" [red]{escape(entry.status)}[/red]" if entry.final and entry.status != "succeeded" else ""
            out.print(f"[magenta]tool[/magenta]  {escape(entry.title)}{shown}")
            return
        if entry.broken:
            return
        done = self._printed.get(name, "")
        if not entry.text.startswith(done):
            # The complete message is another text than its pieces were: all of it, on a line of its own.
            self._begin("", "")
            done = ""
        fresh = entry.text.removeprefix(done)
        if not fresh:
            return
        label = "[bold green]agent[/bold green] " if entry.kind == "agent" else "[dim]think[/dim] "
        self._begin(name, label)
        style = "dim" if entry.kind == "thought" else ""
        out.print(escape(fresh), end="", style=style, soft_wrap=True)
        self._printed[name] = entry.text

    def ask(self, request: event_pb2.InteractionRequested) -> None:
        """Something that the agent asks."""
        self.note(f"[bold yellow]asks[/bold yellow]  {escape(asking(request))}")

    def note(self, markup: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._begin("", "")
            out.print(markup, soft_wrap=True)

    def prompt(self, markup: str) -> None:
        """The beginning of a line that somebody types."""
        if not self._quiet:
            self._begin(_PROMPT, "")
            out.print(markup, end="")

    def typed(self) -> None:
        """Somebody ended the line of the prompt."""
        if self._current == _PROMPT:
            self._current = ""

    def end(self, event: event_pb2.Event) -> None:
        """How a turn ended, how it was got, and what its stages took."""
        summary = ending_summary(event)
        assert summary is not None
        # Of a turn whose driver was lost nobody knows how far it came.
        how = summary.how or ("unknown" if summary.manifest.incomplete else "never reached the agent")
        outcome = event.type.removeprefix("execution.")
        timings = ", ".join(
            f"{stage.stage}{f' ({stage.how})' if stage.how else ''} {stage.duration_us / 1000:.0f} ms"
            for stage in summary.stages
        )
        failed = f" [red]{event.execution_failed.code}: {escape(event.execution_failed.message)}[/red]"
        self.note(
            f"[dim]{outcome}[/dim], [{HOW_COLOURS.get(how, 'red')}]{how}[/] [dim]{timings}[/dim]"
            f"{failed if event.HasField('execution_failed') else ''}"
        )

    def _begin(self, name: str, label: str) -> None:
        if self._current == name:
            return
        if self._current:
            out.print()
        self._current = name
        if label:
            out.print(label, end="")


def asking(request: event_pb2.InteractionRequested) -> str:
    """What the agent asks, in one line, and how it is answered."""
    options = "".join(f" [{option.name or option.option_id}]" for option in request.options)
    match request.kind:
        case event_pb2.INTERACTION_KIND_APPROVAL:
            return f"may it run {request.tool_name} {request.input_json or '{}'}? y or n"
        case event_pb2.INTERACTION_KIND_CLIENT_TOOL:
            return f"for the result of {request.tool_name} {request.input_json or '{}'}, as JSON"
        case _:
            return f"{request.prompt or request.tool_name}{options}"
