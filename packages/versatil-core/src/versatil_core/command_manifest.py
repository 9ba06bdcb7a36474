"""How a model file describes itself on a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from versatil_core.host import INT8_FEATURES
from versatil_core.manifest import Manifest, PackageInfo
from versatil_core.number_text import file_size
from versatil_core.reference_info import DynamicSize, EqualizedLayers, InputSpec, TargetInfo

__all__ = ["manifest_table"]


def manifest_table(manifest: Manifest, file_bytes: int) -> Table:
    """Show what a file is, how it was made, what it takes and what it needs."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(manifest, file_bytes):
        table.add_row(name, _printable(value))
    return table


def _printable(text: str) -> str:
    """Write out what would move the cursor or change colours: a file may come from anywhere."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _rows(manifest: Manifest, file_bytes: int) -> Iterator[tuple[str, str]]:
    info, package = manifest.info, manifest.package
    yield "kind", f"{manifest.kind}, format {manifest.format_version}, {file_size(file_bytes)}"
    yield "written with", _versions(manifest.written_with)
    if info.versions != manifest.written_with:
        yield "quantized with", _versions(info.versions)
    for target in info.targets:
        yield "quantized for", _target(target)
        for option, reason in target.reasons.items():
            yield "", f"{option}: {reason}"
    yield "calibration", _calibration(info.calibration_batches, info.calibration_samples)
    for path, name in info.observers.items():
        yield "", f"observer {name}{f' in {path}' if path else ''}"
    for number, line in enumerate(equalization_lines(info.equalized)):
        yield "" if number else "equalized", line
    for spec in info.inputs:
        yield "input", input_text(spec)
    if package is None:
        yield "runs on", "every machine; int8 kernels come with compile() or package()"
    else:
        yield "packaged for", _target(package.backend)
        yield "needs", _needs(package, manifest.written_with["torch"])
        yield "int8 kernels", f"{package.int8_kernel_calls} calls in its code"
    yield "checked", f"{len(manifest.members)} members, each with the SHA-256 it was written with"


def equalization_lines(groups: Sequence[EqualizedLayers]) -> list[str]:
    """Say what equalization did, one line for each place of the factors and for each reason."""
    if not groups:
        return []
    done = [group for group in groups if not group.reason]
    noun = "group" if len(groups) == 1 else "groups"
    lines = [f"{len(done)} of {len(groups)} {noun} of linear layers that read one tensor"]
    by_place: dict[str, list[EqualizedLayers]] = {}
    for group in groups:
        folded = f"folded into a {group.placement}" if group.folded_into else "by a multiply"
        by_place.setdefault(f"left alone, {group.reason}" if group.reason else folded, []).append(
            group
        )
    for place, members in by_place.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        lines.append(f"{', '.join(members[0].layers)}{more}: {place}{_searched(members)}")
    return lines


def _searched(members: Sequence[EqualizedLayers]) -> str:
    found = [group.alpha for group in members if group.alpha is not None]
    if not found:  # all were left alone: the members are in one place
        return ""
    alphas = [f"{alpha:g}" for alpha in sorted(found)]
    gains = [f"{gain:.1f}" for gain in sorted(group.gain_db for group in members)]
    return f", alpha {_span(alphas)}, errors {_span(gains)} dB less"


def _span(ordered: Sequence[str]) -> str:
    first, last = ordered[0], ordered[-1]
    return first if first == last else f"{first} to {last}"


def input_text(spec: InputSpec) -> str:
    """Return an input as text, such as ``"x: float32 (s0 in 1…64, 3)"``."""
    if spec.shape is None:
        return f"{spec.name}: the constant {spec.value!r}"
    sizes = ", ".join(_size(size) for size in spec.shape)
    comma = "," if len(spec.shape) == 1 else ""
    return f"{spec.name}: {str(spec.dtype).removeprefix('torch.')} ({sizes}{comma})"


def _size(size: int | DynamicSize) -> str:
    if isinstance(size, int):
        return str(size)
    maximum = "" if size.maximum is None else size.maximum
    return f"{size.symbol} in {size.minimum}…{maximum}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _target(target: TargetInfo) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in target.options.items())
    where = f" in {target.module_path}" if target.module_path else ""
    only = f", only {', '.join(target.operators)}" if target.operators else ""
    without = f", without {', '.join(target.exclude)}" if target.exclude else ""
    return f"{target.backend}({options}){where}{only}{without}"


def _calibration(batches: int, samples: int) -> str:
    if batches == 0:
        return "none: scales are measured at every call"
    told = f", {samples} sample{'s' if samples > 1 else ''}" if samples else ""
    return f"{batches} batch{'es' if batches > 1 else ''}{told}"


def _needs(package: PackageInfo, torch: str) -> str:
    deciding = [name for name in INT8_FEATURES if name in package.cpu_features]
    others = len(package.cpu_features) - len(deciding)
    return (
        f"{package.machine} with {', '.join(deciding) or 'no special instructions'} and {others} more "
        f"(made on {package.cpu}); torch {torch}"
    )
