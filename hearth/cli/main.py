"""`hearth`: run Hearth on this machine, and talk to agents through it.

Exit codes: 0 done, 1 done with a bad outcome, 2 wrong usage, 3 no service answers, 4 a service refused.
"""

from __future__ import annotations

import typer

from hearth.cli import (
    bench,
    chat,
    control,
    credentials,
    demo,
    doctor,
    health,
    init,
    pool,
    queue,
    sandboxes,
    sessions,
    stack,
    tokens,
    trace,
)

app = typer.Typer(
    name="hearth", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
stack.register(app)
demo.register(app)
chat.register(app)
sessions.register(app)
control.register(app)
queue.register(app)
credentials.register(app)
sandboxes.register(app)
pool.register(app)
doctor.register(app)
trace.register(app)
tokens.register(app)
health.register(app)
init.register(app)
bench.register(app)


def main() -> None:
    """Entry point of the `hearth` program."""
    app()


if __name__ == "__main__":
    main()
