"""The ``versatil`` command.

stdout is the result, stderr is progress. Exit code 0: fine, 1: the job failed, 2: wrong
usage. Each command imports what it needs itself, so that ``--help`` is quick.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from versatil_core import command_report
from versatil_core.__about__ import __version__
from versatil_core.command_options import (
    AsJson,
    BackendName,
    Exclude,
    OtherBackend,
    RequireInt8,
    Verbose,
)

if TYPE_CHECKING:
    from versatil_core.audit import Audit
    from versatil_core.backend import BasePT2EBackend

__all__ = ["app"]

app = typer.Typer(
    help="Turn float PyTorch models into exact int8 models for the CPU at hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class DemoName(StrEnum):
    """The models that the demo can show."""

    DIGITS = "digits"
    MINILM = "minilm"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"versatil-core {__version__}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Turn float PyTorch models into exact int8 models for the CPU at hand."""


@app.command()
def demo(
    *,
    model: Annotated[
        DemoName,
        typer.Option(help="digits: a small CNN; minilm: a sentence-embedding transformer."),
    ] = DemoName.DIGITS,
    backend: BackendName = "auto",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure int8 against float: a real model on real data.

    Nothing is downloaded. Takes a minute or two.
    """
    from versatil_core.command_job import job

    with job(is_verbose=verbose) as console:
        from versatil_core.command_tables import demo_report, print_result
        from versatil_core.demo import run_demo
        from versatil_core.progress import StageProgress

        with StageProgress(console) as progress:
            result = run_demo(model, _choose_backend(backend), progress)
        if as_json:
            _print_json(result.to_dict())
        else:
            print_result(demo_report(result))


@app.command()
def doctor(*, as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Show what int8 uses here, what is missing, what is risky.

    The exit code is 0 whatever it finds.
    """
    from versatil_core.command_job import job

    with job(is_verbose=verbose):
        from versatil_core.command_tables import doctor_report, print_result
        from versatil_core.doctor import examine

        diagnosis = examine()
        if as_json:
            _print_json(diagnosis.to_dict())
        else:
            print_result(doctor_report(diagnosis))


@app.command()
def backends(*, as_json: AsJson = False, verbose: Verbose = False) -> None:
    """List the installed backends, without importing them."""
    from versatil_core.command_job import job

    with job(is_verbose=verbose):
        from versatil_core.command_tables import backends_table, print_result
        from versatil_core.discovery import KNOWN_PACKAGES, installed_backends

        entries = installed_backends()
        if as_json:
            fields = ("name", "distribution", "version", "object_reference")
            _print_json([{name: getattr(entry, name) for name in fields} for entry in entries])
        elif entries:
            print_result(backends_table(entries))
        else:
            packages = " or ".join(f"pip install {name}" for name in KNOWN_PACKAGES.values())
            typer.echo(f"No backend is installed. Run: {packages}")


@app.command()
def quantize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:factory, a function that returns a model, (model, "
            "example_inputs) or (model, example_inputs, calibration); or a .pt2 file that "
            "torch.export.save wrote. A .pt2 keeps the dynamic sizes it was exported with.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", dir_okay=False)
    ],
    *,
    backend: BackendName = "auto",
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic", help="Measure the activations at every call; needs no calibration."
        ),
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set an option of the backend instead of taking what suits this CPU, such as "
            "saturation=reduce_range. Repeatable.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Representative inputs. A .pt file: a list with one tuple of tensors per "
            "batch. A .npz file: one array per model input, in order, samples along the "
            "first axis; it is cut into batches of the example inputs' size. Goes before "
            "what a factory returns.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[=MODE]",
            help="Quantize this module, with all in it, and nothing else; * stands for any name, "
            "as in layers.*.mlp. MODE is static or dynamic, without it what --dynamic says. "
            "Repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Leave this module float, with all in it. Repeatable."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Quantize operators of this name only, such as linear; names as `inspect` "
            "shows them. Repeatable.",
        ),
    ] = None,
    observer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PATH=]NAME",
            help="How ranges of activations are chosen, in the whole model or in a module: "
            "min_max, moving_average, percentile, mse, entropy or histogram. Repeatable.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="BATCHES",
            help="Stop calibrating after so many batches in a row that move no range.",
        ),
    ] = None,
    equalize: Annotated[
        bool,
        typer.Option(
            "--equalize",
            help="Move outliers from activations into weights first, for the sake of a "
            "transformer's accuracy; needs calibration.",
        ),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Quantize a float model and save it.

    The file is written whole or not at all: after an error, an older one is intact.
    """
    if not output.parent.is_dir():  # say so before the long work, not after it
        raise typer.BadParameter(f"no such folder: {output.parent}", param_hint="--output")
    from versatil_core.command_job import job

    with job(is_verbose=verbose) as console:
        from versatil_core.command_quantize import quantize_to_file
        from versatil_core.command_targets import TargetOptions, read_observers
        from versatil_core.progress import StageProgress

        options = _backend_options(option or (), is_dynamic=dynamic)

        def make_backend(is_dynamic: bool | None) -> "BasePT2EBackend":
            mode = {} if is_dynamic is None else {"is_dynamic": is_dynamic}
            return _choose_backend(backend, {**options, **mode})

        make_backend(None)  # a wrong option is told before the model is loaded
        with StageProgress(console) as progress:
            audit = quantize_to_file(
                source,
                output,
                make_backend,
                calibration,
                progress,
                targets=TargetOptions(target or (), exclude or (), operator or ()),
                equalize=equalize,
                observers=read_observers(observer or ()),
                patience=patience,
            )
        if as_json:
            _print_json({"output": str(output), **audit.to_dict()})
        else:
            _print_audit(audit)
            typer.echo(f"Written to {output}")


@app.command()
def package(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file `quantize` wrote.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", dir_okay=False)
    ],
    *,
    backend: OtherBackend = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Compile a quantized model for this CPU, into a file that loads without a compiler.

    The file is written whole or not at all: after an error, an older one is intact.
    """
    from versatil_core.command_job import job

    with job(is_verbose=verbose) as console:
        from versatil_core.command_package import package_file, package_lines
        from versatil_core.number_text import file_size
        from versatil_core.progress import StageProgress

        with StageProgress(console) as progress:
            manifest = package_file(path, output, backend, progress)
        size = output.stat().st_size
        if as_json:
            _print_json({"output": str(output), "bytes": size, **manifest.to_dict()})
        else:
            for line in package_lines(manifest):
                typer.echo(line)
            typer.echo(f"Written to {output} ({file_size(size)})")


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file `quantize` or `package` wrote.")
    ],
    *,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Ask for another backend than the one the model was quantized for; auto: "
            "the one that suits this CPU. A package has but one."
        ),
    ] = None,
    require_int8: RequireInt8 = False,
    exclude: Exclude = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show what a model file is, which of its layers run as int8, and why others don't.

    The whole file is checked; no code in it is run.
    """
    from versatil_core.command_job import job

    with job(is_verbose=verbose) as console:
        from versatil_core.command_inspect import audit_of_file, checked_manifest
        from versatil_core.command_manifest import manifest_table
        from versatil_core.command_tables import print_result
        from versatil_core.excluded_layers import float_layers_outside

        manifest = checked_manifest(path)
        if not as_json:
            print_result(manifest_table(manifest, path.stat().st_size))
            typer.echo()
        choose = None if backend is None else lambda: _choose_backend(backend)
        result = audit_of_file(path, manifest, choose)
        unexpected = float_layers_outside(result.layers, exclude or ())
        if as_json:
            _print_json({**result.to_dict(), "manifest": manifest.to_dict()})
        else:
            _print_audit(result)
        if require_int8 and unexpected:
            names = ", ".join(layer.module_path or layer.node for layer in unexpected)
            console.print(
                f"error: {len(unexpected)} of {len(result.layers)} layers stay float without "
                f"being excluded: {names}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            raise typer.Exit(1)


app.command()(command_report.report)
app.command()(command_report.bench)
app.command()(command_report.compare)


def _choose_backend(name: str, options: Mapping[str, Any] | None = None) -> "BasePT2EBackend":
    """Make the named backend, or the one for this machine, with this CPU's options."""
    from versatil_core.discovery import host_backend

    return host_backend(None if name == "auto" else name, options)


def _backend_options(settings: Iterable[str], *, is_dynamic: bool) -> dict[str, Any]:
    """Read ``name=value`` texts; a value is JSON, or else a text."""
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{setting!r} is not NAME=VALUE", param_hint="--option")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    if is_dynamic and not options.setdefault("is_dynamic", True):
        raise typer.BadParameter("it contradicts --dynamic", param_hint="--option is_dynamic")
    return options


def _print_audit(audit: "Audit") -> None:
    from versatil_core.command_tables import print_result

    print_result(audit)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
