"""Faults that people have met in fused int8 kernels on x86, each with the right outcome.

Numbered as in the collection that they come from. What the docstring says is what a user expects.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from versatil_core import (
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
    sqnr_db,
)
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

BACKEND = X86InductorBackend(reduce_range=True)  # exact on every CPU
DYNAMIC = X86InductorBackend(is_dynamic=True, reduce_range=True)


@pytest.fixture(autouse=True)
def same_weights() -> Iterator[None]:
    """Make models and inputs the same in every run, and leave no compilation behind."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def quantized(model: nn.Module, *inputs: Tensor, backend: Any = BACKEND, **options: Any) -> Any:
    return quantize(model.eval(), inputs, backend, [inputs], **options)


def code_of(run: Callable[..., Any], *inputs: Tensor) -> tuple[Any, str]:
    """Compile anew; return the result, and the generated code."""
    result, codes = run_and_get_code(run, *inputs)
    return result, "\n".join(codes)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_05_kernels_without_vnni_are_exact(*, is_dynamic: bool) -> None:
    """Nothing to know and nothing to set: ``for_host()`` is exact on the CPU at hand, with all 8 bits if it can."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()  # sums of one sign are what saturates
    x = torch.rand(64, 256)
    backend = X86InductorBackend.for_host(is_dynamic=is_dynamic)
    reference = quantize(model, x, backend, None if is_dynamic else [x])

    lowered = lower(reference, backend)

    assert not backend.reduce_range
    for inputs in (x, 5 * x, torch.ones_like(x)):
        check_exactness(reference, lowered, (inputs,), float_model=model).raise_if_inexact()
        assert sqnr_db(lowered(inputs), reference(inputs)) > (60 if is_dynamic else 40)


class Residual(nn.Module):
    """A convolution behind which something is added, and one that reads the sum."""

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 1)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        return self.third(self.add(self.second(a), a, x))


RESIDUALS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "conv_plus_x": lambda y, _, x: torch.relu(y + x),
    "x_plus_conv": lambda y, _, x: torch.relu(x + y),
    "conv_plus_conv": lambda y, a, _: torch.relu(y + a),
    "in_place": lambda y, a, _: torch.relu_(y.add_(a)),
    "same": lambda y, _a, _x: y + y,
    "broadcast": lambda y, _, x: y + x.mean((2, 3), keepdim=True),
    "scalar": lambda y, _a, _x: y + 1.0,
}
FUSED = ("conv_plus_x", "x_plus_conv", "conv_plus_conv", "in_place")


class AllResiduals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forms = nn.ModuleDict({name: Residual(add) for name, add in RESIDUALS.items()})

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(form(x) for form, x in zip(self.forms.values(), inputs, strict=True))


def test_20_residual_additions() -> None:
    """All forms convert; those that a kernel can do are fused, and the audit shows which."""
    inputs = tuple(torch.randn(1, 8, 8, 8) for _ in RESIDUALS)

    reference = quantized(AllResiduals(), *inputs)

    result = audit(reference, BACKEND)
    assert result.int8_count == len(result.layers) == 3 * len(RESIDUALS)
    post_ops = {layer.module_path: layer.post_ops for layer in result.layers}
    for name in RESIDUALS:
        wanted = ("add", "relu") if name in FUSED else ()
        assert post_ops[f"forms.{name}.second"] == wanted
    check_exactness(reference, lower(reference, BACKEND), inputs).raise_if_inexact()
    results, code = code_of(compile(reference, BACKEND), *inputs)
    assert "qconv2d_pointwise" in code or "qconv_pointwise" in code
    for got, want in zip(results, reference(*inputs), strict=True):
        assert sqnr_db(got, want) > 30  # an int8 step may flip


class Adder(nn.Module):
    """A layer of ``h``, to which ``other`` of ``x`` is added; ``after`` gets the sum and ``x``."""

    def __init__(
        self,
        layer: nn.Module,
        other: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor, Tensor], Any] = lambda y, _: y,
    ) -> None:
        super().__init__()
        self.layer, self.other, self.after = layer, other, after

    def forward(self, h: Tensor, x: Tensor) -> Any:
        return self.after(self.layer(h) + self.other(x), x)


class Itself(nn.Module):
    """The layer's own input, through another op, is what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.layer(torch.sin(x)) + x + 0 * h


def adders() -> dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...]]]:
    """Return name -> module, shape of ``h``, shape of ``x``."""

    def conv() -> nn.Module:
        return nn.Conv2d(4, 4, 3, padding=1)

    flat, image = (4, 8), (1, 4, 8, 8)
    return {
        "input": (Adder(nn.Linear(8, 8)), flat, flat),
        "itself": (Itself(), flat, flat),
        "3d": (Adder(nn.Linear(8, 8)), (1, *flat), (1, *flat)),
        "view": (Adder(nn.Linear(8, 8), lambda x: x[0]), flat, (2, *flat)),
        "alias": (Adder(nn.Linear(8, 8), lambda x: x.view(4, 8)), flat, (8, 4)),
        "later": (Adder(nn.Linear(8, 8), after=lambda y, x: (y, x * 2)), flat, flat),
        "relu": (Adder(nn.Linear(8, 8), after=lambda y, _: y.relu()), flat, flat),
        "conv": (Adder(conv()), image, image),
        "conv_relu": (Adder(conv(), after=lambda y, _: y.relu()), image, image),
        "conv_view": (Adder(conv(), lambda x: x[:1]), image, (2, *image[1:])),
        "conv_later": (Adder(conv(), after=lambda y, x: (y.relu(), x * 2)), image, image),
    }


class AllAdders(nn.Module):
    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.forms = nn.ModuleDict({f"form_{name}": form for name, form in modules.items()})

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        pairs = zip(inputs[::2], inputs[1::2], strict=True)
        return tuple(form(*pair) for form, pair in zip(self.forms.values(), pairs, strict=True))


def tensors(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [leaf for item in tree for leaf in tensors(item)]


@pytest.mark.parametrize(
    "backend",
    [BACKEND, pytest.param(DYNAMIC, marks=pytest.mark.dynamic_convolution)],
    ids=["static", "dynamic"],
)
def test_27_inputs_are_never_overwritten(backend: X86InductorBackend) -> None:
    """As in eager mode; so that a second call with the same tensors gives the same."""
    forms = adders()
    inputs = [torch.randn(shape) for _, *shapes in forms.values() for shape in shapes]
    model = AllAdders({name: module for name, (module, *_) in forms.items()})
    reference = quantized(model, *inputs, backend=backend)
    before = [x.clone() for x in inputs]
    want = tensors(reference(*inputs))

    lowered = lower(reference, backend)
    check_exactness(reference, lowered, inputs).raise_if_inexact()
    compiled = compile(reference, backend)
    first, code = code_of(compiled, *inputs)
    firsts = [result.clone() for result in tensors(first)]
    seconds = tensors(compiled(*inputs))

    assert "qlinear_pointwise" in code
    assert "qconv" in code
    for x, old in zip(inputs, before, strict=True):
        assert torch.equal(x, old)
    for got, again, wanted in zip(firsts, seconds, want, strict=True):
        assert torch.equal(got, again)
        assert sqnr_db(got, wanted) > 60


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        )
        self.linears = nn.Sequential(
            nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.convs(x), self.linears(x)


def test_30_int8_outputs_are_clamped_as_in_the_reference() -> None:
    """A reduced range is kept by the fused quantize, for inputs beyond the calibrated range too."""
    x = torch.randn(2, 8, 16, 16)
    model = Clamped().eval()
    reference = quantize(model, x, BACKEND, [0.3 * x])
    int8 = [layer for layer in audit(reference, BACKEND).layers if layer.output_dtype == "uint8"]
    assert len(int8) == 4
    lowered = lower(reference, BACKEND)
    compiled = compile(reference, BACKEND)

    check_exactness(reference, lowered, (x,)).raise_if_inexact()
    check_exactness(reference, compiled, (x,)).raise_if_inexact()

    for got, want in zip(compiled(x), reference(x), strict=True):
        assert sqnr_db(got, want) > 40
    # The inputs do exceed the range: what is clamped is far from float.
    assert sqnr_db(reference(x)[0], model(x)[0].detach()) < 20
