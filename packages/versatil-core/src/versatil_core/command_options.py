"""Options that several commands have."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show tracebacks and torch's own warnings.")
]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend", help="A name that `versatil backends` lists; auto: what suits this CPU."
    ),
]
OtherBackend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Another backend than the one the model was quantized for; auto: the one that suits "
        "this CPU.",
    ),
]
RequireInt8 = Annotated[
    bool, typer.Option("--require-int8", help="Exit with 1 if a layer stays float.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="A module that may stay float, with all in it. Repeatable."),
]
