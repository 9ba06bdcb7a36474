"""How a report looks on a terminal."""

from collections.abc import Iterable, Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from versatil_core.command_tables import host_line
from versatil_core.latency import Judgement, Timing, is_unsteady
from versatil_core.layer_report import ActivationRange, KernelRun, LayerReport
from versatil_core.number_text import (
    counted,
    decibel,
    duration,
    file_size,
    percent,
    shape_text,
    three_digits,
)
from versatil_core.report_gates import MUCH_SMALLER
from versatil_core.report_result import (
    Accuracy,
    Environment,
    FirstResult,
    Gate,
    Report,
    Size,
    SpeedPoint,
    VerdictCode,
)

__all__ = [
    "JUDGEMENTS",
    "float_reasons",
    "kernel_share_lines",
    "report_table",
    "unsteady_note",
    "worst_ranges",
]

MANY = 12
MANY_KERNELS = 40
"""A terminal shows no more of what a page shows all of."""
LOW_USE = 0.5
"""A range that leaves so much of its grid empty is worth a look."""
MUCH_CLIPPED = 0.001
JUDGEMENTS = {
    Judgement.FASTER: "faster",
    Judgement.SLOWER: "slower",
    Judgement.SAME_SPEED: "as fast",
    Judgement.TOO_NOISY: "too noisy to tell",
}
_TEXTS = {"op", "computes", "kernel", "kernel against reference", "outlier channels", ""}
_GOOD = {VerdictCode.FASTER, VerdictCode.SAME_SPEED, VerdictCode.NOT_TIMED}


def report_table(report: Report) -> RenderableType:
    """Show the verdict, then one section for each thing that was measured."""
    style = "bold green" if report.verdict.code in _GOOD else "bold yellow"
    parts: list[RenderableType] = [Text(report.verdict.sentence, style=style)]
    parts += [_gate(gate) for gate in report.gates]
    for title, content in _sections(report):
        parts += [Text(), Text(title, style="bold"), content]
    if report.notes:
        parts += [Text(), Text("Notes", style="bold")]
        parts += [_indented(note) for note in report.notes]
    parts += [Text(), Text(_environment_lines(report.environment), style="dim")]
    return Group(*parts)


def float_reasons(layers: Iterable[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """Group the layers that stay float by their reasons; twelve equal ones tell nothing."""
    groups: dict[tuple[str, str], list[LayerReport]] = {}
    for layer in layers:
        if layer.reason is not None:
            groups.setdefault((layer.op, layer.reason), []).append(layer)
    return [(reason, found) for (_, reason), found in groups.items()]


def worst_ranges(ranges: Iterable[ActivationRange]) -> list[ActivationRange]:
    """Return the ranges worth a look: clipped, badly used or with outlier channels; the worst first."""
    found = [
        each
        for each in ranges
        if each.clipped_share > MUCH_CLIPPED or each.used_share < LOW_USE or each.outlier_channels
    ]
    return sorted(found, key=lambda each: (each.used_share, -each.clipped_share))


def unsteady_note(points: Iterable[SpeedPoint]) -> str:
    """Say that the machine was busy, if it was; otherwise empty."""
    timings = [
        timing for each in points for timing in (each.float_eager, each.float_compiled, each.int8)
    ]
    if any(is_unsteady(each.median, each.low, each.high) for each in timings):
        return "The machine was busy: the times vary a lot. Measure again when it is quiet."
    return ""


def kernel_share_lines(report: Report) -> list[str]:
    """Say how much of a call is in the kernels of the layers, if that is known."""
    of_float, of_int8 = report.float_kernel_share, report.int8_kernel_share
    if of_float is None or of_int8 is None:
        return []
    shares = f"{percent(of_int8)} of a call of the int8 model, and {percent(of_float)}"
    return [f"These kernels take {shares} of the compiled float model."]


def _sections(report: Report) -> Iterator[tuple[str, RenderableType]]:
    if report.speed:
        yield "Speed, each model in its turn", _speed(report.speed)
    if report.accuracy is not None:
        yield "Accuracy of the whole model", _accuracy(report.accuracy)
        if any(layer.accuracy is not None for layer in report.layers):
            yield "Layers that add the most error", _errors(report.layers)
        if worst := worst_ranges(report.ranges):
            yield "Ranges worth a look", _ranges(worst)
    kernels = Group(_kernels(report.layers), *map(_indented, kernel_share_lines(report)))
    yield f"{report.int8_count} of {len(report.layers)} layers int8", kernels
    if report.size is not None:
        yield "Size", _size(report.size)
    if report.first_result:
        yield "First result of a new process, with nothing cached", _first(report.first_result)


def _speed(points: Iterable[SpeedPoint]) -> RenderableType:
    table = _table("threads,\nbatch", "float\neager", "float\ncompiled", "int8", "int8 is", "")
    for column in table.columns:
        column.no_wrap = True
    points = [*points]
    for point in points:
        is_good = point.judgement in {Judgement.FASTER, Judgement.SAME_SPEED}
        table.add_row(
            f"{point.threads}, {point.batch}",
            *(_timing(each) for each in (point.float_eager, point.float_compiled, point.int8)),
            f"{point.speedup.median:.2f}x\n{point.speedup.low:.2f} to {point.speedup.high:.2f}",
            Text(JUDGEMENTS[point.judgement], style="green" if is_good else "yellow"),
        )
    note = unsteady_note(points)
    return Group(table, *([Text(note, style="yellow")] if note else []))


def _accuracy(found: Accuracy) -> RenderableType:
    table = _table("", "", is_headed=False)
    for metric in found.metrics:
        change = metric.int8_value - metric.float_value
        table.add_row(
            Text(metric.name),
            f"{metric.float_value:.4g} -> {metric.int8_value:.4g} ({change:+.2g})",
        )
    for name, db in (
        ("SQNR, int8 against float", found.sqnr_db),
        ("SQNR, reference against float", found.reference_sqnr_db),
        ("SQNR, int8 against reference", found.kernels_sqnr_db),
    ):
        if db is not None:
            table.add_row(name, decibel(db))
    if found.cosine is not None:
        table.add_row("cosine similarity to float", f"{found.cosine:.6f}")
    if found.equal_share is not None:
        table.add_row("integers equal to float", percent(found.equal_share))
    table.add_row("largest difference to float", f"{found.max_error:.3g}")
    table.add_row("operations exact", f"{found.exact_ops} of {found.ops}")
    batches = counted(found.batches, "batch")
    table.add_row("measured on", f"{counted(found.samples, 'sample')} in {batches}")
    return table


def _errors(layers: Iterable[LayerReport]) -> RenderableType:
    table = _table("layer", "op", "introduced", "up to there", "kernel against reference")
    known = [layer for layer in layers if layer.accuracy is not None and layer.is_int8]
    for layer in sorted(known, key=_introduced)[:MANY]:
        assert layer.accuracy is not None
        exactness = layer.accuracy.exactness
        table.add_row(
            Text(layer.name),
            layer.op,
            decibel(layer.accuracy.introduced_db),
            decibel(layer.accuracy.accumulated_db),
            Text(exactness, style="" if layer.accuracy.is_exact is not False else "bold red"),
        )
    return table


def _introduced(layer: LayerReport) -> float:
    assert layer.accuracy is not None
    return layer.accuracy.introduced_db


def _ranges(ranges: list[ActivationRange]) -> RenderableType:
    table = _table("read by", "grid", "values", "grid used", "clipped", "outlier channels")
    for each in ranges[:MANY]:
        outliers = f"{len(each.outlier_channels)} of {each.channels}"
        table.add_row(
            Text(", ".join(each.readers)),
            f"{each.grid_low:.3g} to {each.grid_high:.3g}",
            f"{each.minimum:.3g} to {each.maximum:.3g}",
            percent(each.used_share),
            percent(each.clipped_share),
            outliers if each.outlier_channels else "",
        )
    more = len(ranges) - MANY
    return Group(table, *([_indented(f"and {more} more")] if more > 0 else []))


def _kernels(layers: Iterable[LayerReport]) -> RenderableType:
    layers = [*layers]
    is_timed = any(layer.int8_run or layer.float_run for layer in layers)
    headings = ("float", "int8", "int8 is") if is_timed else ()
    table = _table("layer", "computes", *headings, "kernel" if is_timed else "")
    int8_layers = [layer for layer in layers if layer.is_int8]
    shown = _shown_kernels(int8_layers)
    for layer in shown:
        times = (_seconds(layer.float_run), _seconds(layer.int8_run), _ratio(layer))
        table.add_row(
            Text(layer.name),
            Text(_computes(layer)),
            *(times if is_timed else ()),
            Text(layer.int8_run.implementation if layer.int8_run else ""),
        )
    parts: list[RenderableType] = [table] if table.row_count else []
    if hidden := len(int8_layers) - len(shown):
        what = counted(hidden, "faster layer")
        parts.append(_indented(f"and {what}; a page shows all: -o report.html"))
    for reason, found in float_reasons(layers):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        parts.append(_indented(f"{found[0].name}{more} ({found[0].op}) stays float: {reason}"))
    return Group(*parts)


def _shown_kernels(layers: list[LayerReport]) -> list[LayerReport]:
    """Keep those that take longest, in running order, where there are many."""
    slowest = sorted(layers, key=lambda layer: layer.int8_run.seconds if layer.int8_run else 0.0)
    kept = {layer.node for layer in slowest[-MANY_KERNELS:]}
    return [layer for layer in layers if layer.node in kept]


def _computes(layer: LayerReport) -> str:
    shape = shape_text(layer.input_shape)
    what = f"{' + '.join((layer.op, *layer.post_ops))} -> {layer.output_dtype}, {shape}"
    return f"{what}; may saturate" if layer.may_saturate else what


def _seconds(run: KernelRun | None) -> str:
    return "" if run is None else duration(run.seconds)


def _ratio(layer: LayerReport) -> Text:
    if layer.speedup is None:
        return Text()
    return Text(f"{layer.speedup:.2f}x", style="yellow" if layer.speedup < 1 else "")


def _size(size: Size) -> RenderableType:
    table = _table("", "float", "int8", "")
    rows = (
        ("file", size.float_file, size.int8_file),
        ("weights in memory", size.float_weights, size.int8_weights),
        ("memory of a call", size.float_call, size.int8_call),
        ("memory of the process", size.float_process, size.int8_process),
    )
    for name, of_float, of_int8 in rows:
        if of_float is None or of_int8 is None:
            continue
        is_smaller = of_int8 > 0 and of_float / of_int8 >= MUCH_SMALLER
        ratio = f"{of_float / of_int8:.1f}x smaller" if is_smaller else ""
        table.add_row(name, file_size(of_float), file_size(of_int8), ratio)
    return table


def _first(results: Mapping[str, FirstResult]) -> RenderableType:
    table = _table("", "import", "load", "compile", "altogether")
    for name, result in results.items():
        seconds = (result.import_seconds, result.load_seconds, result.compile_seconds)
        table.add_row(name, *(duration(each) for each in (*seconds, result.total_seconds)))
    return table


def _gate(gate: Gate) -> Text:
    passed, style = ("passed", "green") if gate.is_passed else ("failed", "bold red")
    return Text.assemble((f"{passed}: ", style), gate.text)


def _timing(timing: Timing) -> str:
    low, high = three_digits(timing.low * 1e3), three_digits(timing.high * 1e3)
    return f"{three_digits(timing.median * 1e3)} ms\n{low} to {high}"


def _environment_lines(environment: Environment) -> str:
    host = environment.host
    options = ", ".join(f"{name}={value!r}" for name, value in environment.options.items())
    versions = ", ".join(f"{name} {value}" for name, value in environment.versions.items())
    return (
        f"{host_line(host)} ({', '.join(host.features)}); "
        f"{counted(environment.threads, 'thread')}.\n{versions}.\n"
        f"{environment.backend}({options}), calibrated with "
        f"{counted(environment.calibration_batches, 'batch')}. "
        f"{environment.date}"
    )


def _table(*headings: str, is_headed: bool = True) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if is_headed else None,
        show_header=is_headed,
        show_edge=False,
        pad_edge=False,
    )
    for index, heading in enumerate(headings):
        is_text = index == 0 or heading in _TEXTS or not is_headed
        table.add_column(heading, overflow="fold", justify="left" if is_text else "right")
    return table


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))
