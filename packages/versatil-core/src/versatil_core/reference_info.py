"""What a reference says about itself: how it was made, and which inputs it takes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch

from versatil_core.errors import ModelFileError

_META_KEY = "versatil"


@dataclass(frozen=True)
class DynamicSize:
    """A size that may vary.

    Attributes:
        symbol: Sizes with an equal symbol are equal; may be an expression such as ``"2*s0"``.
        minimum: Smallest size.
        maximum: Largest size; None is unbounded.
        example: The size in the example inputs.
    """

    symbol: str
    minimum: int
    maximum: int | None
    example: int


@dataclass(frozen=True)
class InputSpec:
    """One input of an exported model, in the order in which they are flattened.

    Attributes:
        name: Its name in the exported graph.
        shape: Sizes of a tensor; None if the input is no tensor.
        dtype: The tensor's dtype as text, such as ``"torch.float32"``; None if no tensor.
        value: The constant that the model was exported with, if the input is no tensor.
    """

    name: str
    shape: tuple[int | DynamicSize, ...] | None
    dtype: str | None
    value: int | float | bool | str | None = None


@dataclass(frozen=True)
class TargetInfo:
    """A quantization target as it can be written to a file.

    Attributes:
        module_path: The quantized submodule, or a pattern; ``""`` is the whole model.
        backend: Name of the backend.
        options: Constructor options of the backend.
        reasons: Option -> why it has its value, where the backend says so.
        exclude: Module paths of what stays float inside.
        operators: Names of the operators that are quantized; empty for all.
    """

    module_path: str
    backend: str
    options: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class EqualizedLayers:
    """What equalization did with the linear layers that read one tensor.

    Attributes:
        layers: Their module paths.
        alpha: The exponent of the factors; None if the layers were left alone.
        placement: Where the factors are: ``"layer norm"`` or ``"linear"``, at no cost, or
            ``"multiply"``; ``""`` if the layers were left alone.
        folded_into: Module path of that layer norm or linear; ``""`` if there is none.
        gain_db: By how much the error of the layers' outputs is less, on calibration data that
            the factors weren't made from.
        reason: Why the layers were left alone; ``""`` if they weren't.
    """

    layers: tuple[str, ...]
    alpha: float | None
    placement: str
    folded_into: str
    gain_db: float
    reason: str


@dataclass(frozen=True)
class ReferenceInfo:
    """How a reference was made; kept in ``reference.meta["versatil"]`` and in saved files.

    Attributes:
        targets: What was quantized, and for which backend.
        inputs: What the reference takes.
        calibration_batches: Number of calibration batches that the observers saw, without the
            example inputs.
        versions: Distribution -> version with which it was made.
        equalized: What equalization did, for each group of linear layers; empty without it.
        observers: Module path -> name of the observer that was asked for.
        calibration_samples: Number of samples in those batches; 0 in files that don't say.
    """

    targets: tuple[TargetInfo, ...]
    inputs: tuple[InputSpec, ...]
    calibration_batches: int
    versions: Mapping[str, str]
    equalized: tuple[EqualizedLayers, ...] = ()
    observers: Mapping[str, str] = field(default_factory=dict)
    calibration_samples: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; :meth:`from_dict` is the way back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_dict` returned.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is not what it should be.
        """
        return cls(
            targets=tuple(target_info(target) for target in values["targets"]),
            inputs=tuple(_input_spec(spec) for spec in values["inputs"]),
            calibration_batches=int(values["calibration_batches"]),
            versions=texts(values["versions"]),
            # Files that were written before there was equalization say nothing of it.
            equalized=tuple(_equalized_layers(group) for group in values.get("equalized", ())),
            observers=texts(values.get("observers", {})),
            calibration_samples=int(values.get("calibration_samples", 0)),
        )


def reference_info(reference: torch.fx.GraphModule) -> ReferenceInfo:
    """Return how a reference was made.

    Args:
        reference: A module from :func:`versatil_core.quantize` or :func:`versatil_core.load`.

    Raises:
        ModelFileError: The module was made by something else.
    """
    info = find_reference_info(reference)
    if info is None:
        raise ModelFileError(
            "this module carries no information about its quantization: it must come from "
            "versatil_core.quantize() or versatil_core.load()",
            path="",
        )
    return info


def find_reference_info(reference: torch.fx.GraphModule) -> ReferenceInfo | None:
    """Return how a reference was made; None if it was made by something else, such as torchao alone."""
    info = getattr(reference, "meta", {}).get(_META_KEY)
    return info if isinstance(info, ReferenceInfo) else None


def attach_reference_info(reference: torch.fx.GraphModule, info: ReferenceInfo) -> None:
    """Keep the information with the module; deep copies of the module keep it too."""
    reference.meta[_META_KEY] = info


def target_info(values: Mapping[str, Any]) -> TargetInfo:
    """Rebuild a target from JSON values.

    Raises:
        TypeError: A field is missing or not what it should be.
    """
    info = TargetInfo(**values)
    if not (isinstance(info.module_path, str) and isinstance(info.backend, str)):
        raise TypeError(f"a target names a module and a backend, not {info}")
    names = (*info.exclude, *info.operators)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"a target excludes modules and names operators, not {names}")
    return replace(
        info,
        options={**info.options},
        reasons=texts(info.reasons),
        exclude=tuple(info.exclude),
        operators=tuple(info.operators),
    )


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the same, known to map texts to texts.

    Raises:
        TypeError: Something else is in it.
    """
    if not isinstance(values, Mapping) or not all(
        isinstance(text, str) for text in values.values()
    ):
        raise TypeError(f"expected names and texts, got {values!r}")
    return dict(values)


def _equalized_layers(values: Mapping[str, Any]) -> EqualizedLayers:
    found = EqualizedLayers(**values)
    named = (*found.layers, found.placement, found.folded_into, found.reason)
    if not all(isinstance(text, str) for text in named):
        raise TypeError(f"equalized layers are named by texts, not as in {found}")
    alpha = None if found.alpha is None else float(found.alpha)
    return replace(found, layers=tuple(found.layers), alpha=alpha, gain_db=float(found.gain_db))


def _input_spec(values: Mapping[str, Any]) -> InputSpec:
    shape = values["shape"]
    if shape is not None:
        shape = tuple(
            DynamicSize(**size) if isinstance(size, Mapping) else int(size) for size in shape
        )
    return InputSpec(name=values["name"], shape=shape, dtype=values["dtype"], value=values["value"])
