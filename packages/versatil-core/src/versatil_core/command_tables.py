"""How the commands' results look on a terminal."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from versatil_core.demo_result import DeclinedLayer, DemoResult
from versatil_core.discovery import BackendEntry
from versatil_core.doctor import Diagnosis, Int8Plan
from versatil_core.host import Host
from versatil_core.latency import Timing, is_unsteady
from versatil_core.number_text import counted, faster, file_size, three_digits

__all__ = ["backends_table", "demo_report", "doctor_report", "print_result"]


UNSTEADY = "The machine was busy: the latencies vary a lot. Measure again when it is quiet."


def print_result(result: RenderableType) -> None:
    """Print on stdout; colours only in a terminal."""
    Console(highlight=False, markup=False, emoji=False).print(result)


def demo_report(result: DemoResult) -> RenderableType:
    """Show a demo's measurements: float and int8 side by side, then what stays float."""
    table = Table(
        title=f"{result.title}, in float and in int8",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("", overflow="fold")
    for heading in ("float32", "int8", "int8 is"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _demo_rows(result):
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    if result.declined:
        parts += [Text(), Text("Stays float, and why:")]
        parts += [_indented(line) for line in _declined_lines(result.declined)]
    if _is_unsteady(result.float_latency) or _is_unsteady(result.int8_latency):
        parts += [Text(), Text(UNSTEADY, style="yellow")]
    parts += [Text(), Text(_machine_line(result), style="dim")]
    return Group(*parts)


def doctor_report(diagnosis: Diagnosis) -> RenderableType:
    """Show what int8 will use here, then each problem and risk."""
    table = _plain_table()
    table.add_row("CPU", host_line(diagnosis.host))
    table.add_row("  for int8", ", ".join(diagnosis.host.features) or "unknown")
    table.add_row("Python", diagnosis.python)
    for distribution, version in diagnosis.versions.items():
        table.add_row(distribution, version)
    table.add_row("C++ compiler", diagnosis.compiler or "none")
    for backend in diagnosis.backends:
        state = "does not work, see below" if backend.error else "works"
        table.add_row(
            f"backend {backend.name}", f"{backend.distribution} {backend.version}, {state}"
        )
    if not diagnosis.backends:
        table.add_row("backends", "none")
    parts: list[RenderableType] = [table, Text()]
    if diagnosis.int8 is not None:
        parts += [_plan_table(diagnosis.int8), Text()]
    styles = {"problem": "bold red", "risk": "bold yellow"}
    parts += [
        Text.assemble((f"{finding.level}: ", styles[finding.level]), finding.message)
        for finding in diagnosis.findings
    ]
    if not diagnosis.findings:
        parts.append(Text("No problem found.", style="green"))
    return Group(*parts)


def backends_table(entries: Iterable[BackendEntry]) -> RenderableType:
    """Show the registered backends."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("backend", "package", "version", "class"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        table.add_row(entry.name, entry.distribution, entry.version, entry.object_reference)
    return table


def host_line(host: Host) -> str:
    """Name the CPU in one line."""
    return f"{host.cpu}, {counted(host.cores, 'core')}, {host.machine}"


def _demo_rows(result: DemoResult) -> list[tuple[str, str, str, str]]:
    accuracy_change = 100 * (result.int8_accuracy - result.float_accuracy)
    reference = result.sqnr_reference
    return [
        (
            f"accuracy, {result.held_out}",
            f"{result.float_accuracy:.2%}",
            f"{result.int8_accuracy:.2%}",
            f"{accuracy_change:+.2f} points",
        ),
        ("the same answer as float", "", f"{result.same_answers:.2%}", ""),
        ("SQNR against float", "", f"{result.sqnr_float:.1f} dB", ""),
        (
            "SQNR against the reference",
            "",
            "equal" if reference is None else f"{reference:.1f} dB",
            "",
        ),
        ("operations exact", "", f"{result.exact_ops} of {result.ops}", ""),
        (
            f"latency, median of {result.rounds} turns",
            _milliseconds(result.float_latency),
            _milliseconds(result.int8_latency),
            faster(result.speedup),
        ),
        (
            "  the middle half of them",
            _spread(result.float_latency),
            _spread(result.int8_latency),
            "",
        ),
        (
            "size on disk",
            file_size(result.float_bytes),
            file_size(result.int8_bytes),
            f"{result.float_bytes / result.int8_bytes:.1f}x smaller",
        ),
        ("layers in int8", "", f"{result.int8_layers} of {result.layers}", ""),
    ]


def _milliseconds(latency: Timing) -> str:
    return f"{three_digits(latency.median * 1e3)} ms"


def _spread(latency: Timing) -> str:
    return f"{three_digits(latency.low * 1e3)} to {three_digits(latency.high * 1e3)}"


def _is_unsteady(latency: Timing) -> bool:
    return is_unsteady(latency.median, latency.low, latency.high)


def _declined_lines(declined: Iterable[DeclinedLayer]) -> list[str]:
    """One line for all layers that stay float for one reason; twelve equal ones tell nothing."""
    groups: dict[tuple[str, str], list[str]] = {}
    for layer in declined:
        groups.setdefault((layer.op, layer.reason), []).append(layer.module_path)
    return [
        f"{paths[0] or op}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {reason}"
        for (op, reason), paths in groups.items()
    ]


def _machine_line(result: DemoResult) -> str:
    shapes = ", ".join("x".join(map(str, shape)) for shape in result.batch)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    features = ", ".join(result.host.features)
    return (
        f"Both compiled by Inductor and frozen; inputs {shapes}; {counted(result.threads, 'thread')}.\n"
        f"{host_line(result.host)} ({features}).\n{versions}.\n{result.backend}"
    )


def _plan_table(plan: Int8Plan) -> Table:
    table = _plain_table()
    options: Iterable[tuple[str, Any]] = plan.options.items()
    table.add_row(
        "int8 here", f"{plan.backend}({', '.join(f'{key}={value}' for key, value in options)})"
    )
    for option, reason in plan.reasons.items():
        table.add_row(f"  {option}", reason)
    table.add_row("  layers", ", ".join(plan.ops))
    table.add_row("  activations", ", ".join(plan.activations))
    table.add_row("  weights", ", ".join(plan.weights).replace("_", " "))
    table.add_row("  fused with them", ", ".join(plan.post_ops) or "nothing")
    without = "no instructions for it: float_dtype=bfloat16 works here, but won't be faster"
    table.add_row("  bfloat16", ", ".join(plan.bfloat16) or without)
    return table


def _plain_table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=22)
    table.add_column(overflow="fold")
    return table


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))
