"""Training of models whose weights and batch norms are used in unusual ways; and how batch norms fold without it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from versatil_core import (
    NothingQuantizedError,
    QuantizationTarget,
    TrainingUnsupportedError,
    convert,
    export,
    prepare,
    prepare_qat,
    quantize,
    sqnr_db,
)

aten = torch.ops.aten
IMAGES = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
SEQUENCES = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def with_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms something to do."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            nn.init.normal_(buffer)
        if name.endswith("running_var"):
            nn.init.uniform_(buffer, 0.5, 2)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.affine:
            nn.init.normal_(module.weight)
    return model.eval()


class Shared(nn.Module):
    """One convolution, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.first = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)


class WithTwoNorms(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.conv(x)))
        result: Tensor = self.head(torch.relu(self.second(self.conv(x))))
        return result


class WithOneNorm(Shared):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.conv(torch.relu(self.first(self.conv(x))))))
        return result


class WithOneNormTwice(Shared):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.relu(self.first(self.conv(x)))
        result: Tensor = self.head(x)
        return result


class ReadBySomethingElse(Shared):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        result: Tensor = self.head(torch.relu(self.first(y) + y))
        return result


class Functional(Shared):
    """The batch norm and the dropout are functions."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.first
        mean, variance = norm.running_mean, norm.running_var
        y = functional.batch_norm(
            self.conv(x), mean, variance, norm.weight, norm.bias, self.training, 0.1, 1e-3
        )
        y = functional.dropout(torch.relu(y), 0.1, self.training)
        result: Tensor = self.head(y)
        return result


class TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return result


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


# Model, input, and whether a batch norm stays in the reference.
MODELS: dict[str, tuple[Any, Tensor, bool]] = {
    "called twice, two norms": (WithTwoNorms, IMAGES, False),
    "called twice, one with a norm": (WithOneNorm, IMAGES, False),
    "called twice with its norm": (WithOneNormTwice, IMAGES, False),
    "a norm whose input is read": (ReadBySomethingElse, IMAGES, True),
    "functions": (Functional, IMAGES, False),
    "tied linears": (TiedLinears, ROWS, False),
    "no norm": (lambda: sequence(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), ROWS, False),
    "conv1d": (lambda: sequence(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), SEQUENCES, False),
    "conv3d": (
        lambda: sequence(nn.Conv3d(4, 4, 1, bias=False), nn.BatchNorm3d(4)),
        IMAGES[..., None],
        False,
    ),
    "grouped": (lambda: sequence(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)), IMAGES, False),
    "transposed": (
        lambda: sequence(nn.ConvTranspose2d(4, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)),
        IMAGES,
        False,
    ),
    "transposed, grouped": (
        lambda: sequence(
            nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        ),
        IMAGES,
        True,
    ),
    "a norm of another axis": (
        lambda: sequence(nn.Linear(6, 5), nn.BatchNorm1d(4)),
        SEQUENCES,
        True,
    ),
    "a norm of each batch": (
        lambda: sequence(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        IMAGES,
        True,
    ),
    "a norm in front": (lambda: sequence(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)), IMAGES, True),
    "in place": (
        lambda: sequence(
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)),
            nn.Dropout2d(0.1, inplace=True),
        ),
        IMAGES,
        False,
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), SEQUENCES, False),
}


def norms_in(reference: GraphModule) -> int:
    return len(reference.graph.find_nodes(op="call_function", target=aten.batch_norm.default))


def test_batch_norms_fold_without_training(training_backend: Any) -> None:
    """The folding of torchao is wrong or fails for some of these."""
    for name, (make, x, stays) in MODELS.items():
        model = with_statistics(make())
        if name == "a norm of each batch":
            model.train()  # in eval mode it is the same
        reference = quantize(model, x, training_backend(), [x])
        assert sqnr_db(reference(x), model(x)) > 20, name
        assert bool(norms_in(reference)) == stays, name


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_form_is_trained(training_backend: Any, name: str, *, is_dynamic: bool) -> None:
    make, x, stays = MODELS[name]
    model, backend = with_statistics(make()), training_backend(is_dynamic=is_dynamic)
    trainable = prepare_qat(model, x, backend)
    assert len([*trainable.parameters()]) >= len([*model.parameters()])
    # Before any training it rounds the float model.
    assert sqnr_db(trainable.eval()(x), model(x)) > 20

    optimizer = torch.optim.SGD(trainable.train().parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        loss = (trainable(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    reference = convert(trainable.eval())
    assert sqnr_db(reference(x), trainable(x)) > 90
    assert bool(norms_in(reference)) == stays
    post_training = quantize(model, x, backend, [x])
    assert [*dict(reference.named_parameters())] == [*dict(post_training.named_parameters())]


def test_prepare_and_convert_fold_as_quantize_does(training_backend: Any) -> None:
    model = with_statistics(WithTwoNorms())
    exported = export(model, IMAGES)
    state = {name: value.clone() for name, value in exported.state_dict().items()}

    prepared = prepare(exported, training_backend())
    prepared(IMAGES)

    assert sqnr_db(convert(prepared)(IMAGES), model(IMAGES)) > 20
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in state.items())


def test_a_norm_that_starts_at_zero_learns(training_backend: Any) -> None:
    """As in residual blocks that are initialized to be the identity."""
    model = sequence(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    nn.init.zeros_(model.get_parameter("1.weight"))
    trainable = prepare_qat(model, IMAGES, training_backend())
    loss = (trainable(IMAGES) - 1).square().mean()
    loss.backward()

    gradient = trainable.get_parameter("1.weight").grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).all()
    assert sqnr_db(convert(trainable)(IMAGES), trainable.eval()(IMAGES)) > 90


@pytest.mark.parametrize("sign", [-1, 1])
def test_weights_of_one_sign_are_symmetric(training_backend: Any, sign: int) -> None:
    """The fused operator of torch gives them a zero point, and no kernel takes one."""
    model = nn.Linear(6, 3)
    nn.init.constant_(model.weight, sign * 0.7)
    trainable = prepare_qat(model, ROWS, training_backend())
    trainable(ROWS)

    reference = convert(trainable)

    assert not reference.get_buffer("weight_zero_point").any()
    assert sqnr_db(reference(ROWS), trainable.eval()(ROWS)) > 100


def test_a_weight_that_grows_is_not_clipped(training_backend: Any) -> None:
    trainable = prepare_qat(nn.Linear(6, 3), ROWS, training_backend())
    trainable(ROWS)
    with torch.no_grad():
        trainable.get_parameter("weight").mul_(5)
    trainable(ROWS)

    weight = convert(trainable).get_buffer("weight")

    assert weight.abs().max() == 127
    # At most one in each row is rounded to the end of the range.
    assert ((weight.abs() >= 127).sum(1) <= 1).all()


def test_tied_weights_stay_one(training_backend: Any) -> None:
    trainable = prepare_qat(TiedLinears(), ROWS, training_backend())
    weights = [parameter for parameter in trainable.parameters() if parameter.dim() == 2]
    assert len(weights) == 1


class Autoencoder(nn.Module):
    """Its second product is with the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) @ self.weight.t()


def test_a_weight_in_two_forms_is_refused(training_backend: Any) -> None:
    with pytest.raises(TrainingUnsupportedError, match=r"two forms.*weight_1 would be trained"):
        prepare_qat(Autoencoder(), ROWS, training_backend())
    quantize(Autoencoder(), ROWS, training_backend(), [ROWS])  # which trains nothing


def test_part_of_a_model(training_backend: Any) -> None:
    model = sequence(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    targets = [
        QuantizationTarget("0", training_backend()),
        QuantizationTarget("4", training_backend(is_dynamic=True)),
    ]
    trainable = prepare_qat(model, ROWS, targets)
    trainable(ROWS).sum().backward()

    reference = convert(trainable.eval())

    assert sqnr_db(reference(ROWS), trainable(ROWS)) > 100
    assert reference.get_parameter("2.weight").dtype is torch.float32
    assert reference.get_buffer("0.weight").dtype is torch.int8
    with pytest.raises(NothingQuantizedError, match="'1'"):
        prepare_qat(model, ROWS, QuantizationTarget("1", training_backend()))


def test_a_backend_without_the_option(training_backend: Any) -> None:
    class Fixed(training_backend):  # type: ignore[misc]
        def __init__(self, *, is_dynamic: bool = False) -> None:
            super().__init__(is_dynamic=is_dynamic)

    with pytest.raises(TrainingUnsupportedError, match="has no option is_qat"):
        prepare_qat(nn.Linear(6, 3), ROWS, Fixed())
