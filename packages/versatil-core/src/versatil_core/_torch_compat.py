"""Every private or version-dependent part of torch that versatil_core uses.

Checked on torch 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

import gc
import importlib
import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

import torch
from torch.utils import _pytree as pytree


def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Flatten the inputs of a call to its leaves, in the order of the exported placeholders."""
    leaves, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return list(leaves)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a nested result, in order."""
    return list(pytree.tree_leaves(tree))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the nested result with ``function`` applied to each leaf."""
    return pytree.tree_map(function, tree)


def unflatten_like(
    leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put leaves into the structure of ``(args, kwargs)``."""
    _, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    unflattened: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
        list(leaves), structure
    )
    return unflattened


def unflatten_for_call(
    module: torch.fx.GraphModule, leaves: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put leaves into the structure with which an exported module is called."""
    # _in_spec is what the generated forward() itself flattens its inputs with.
    call: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
        list(leaves),
        module._in_spec,  # noqa: SLF001 -- torch has no public name for it
    )
    return call


def unflatten_for_program(
    program: torch.export.ExportedProgram, leaves: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put leaves into the structure with which an exported program is called."""
    call: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
        list(leaves), program.call_spec.in_spec
    )
    return call


def load_program(archive: IO[bytes]) -> torch.export.ExportedProgram:
    """Read an exported program.

    torch.export.load does the same, but logs the traceback of an error instead of raising it, and
    then tries formats that are pickles.
    """
    package: Any = importlib.import_module("torch.export.pt2_archive._package")
    program = package.load_pt2(archive).exported_programs["model"]
    assert isinstance(program, torch.export.ExportedProgram)
    return program


def in_call_order(module: torch.fx.GraphModule, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bring inputs by name into the order of the placeholders; unknown names come last."""
    spec = getattr(module, "_in_spec", None)
    known = [] if spec is None else pytree.tree_unflatten([None] * spec.num_leaves, spec)[1]
    return {name: kwargs[name] for name in (*known, *kwargs) if name in kwargs}


def same_structure(
    args: Sequence[Any], kwargs: Mapping[str, Any], like: tuple[Sequence[Any], Mapping[str, Any]]
) -> bool:
    """Whether two calls have the same nesting, not looking at the leaves."""
    _, given = pytree.tree_flatten((tuple(args), dict(kwargs)))
    _, wanted = pytree.tree_flatten((tuple(like[0]), dict(like[1])))
    return bool(given == wanted)


def symbol_name(size: torch.SymInt) -> str:
    """Return the expression of a symbolic size, such as ``"s0"`` or ``"2*s0"``."""
    return str(size.node.expr)


def symbol_hint(size: torch.SymInt) -> int:
    """Return the example value of a symbolic size."""
    return int(size.node.hint)


def symbol_range(size: torch.SymInt) -> tuple[int, int | None]:
    """Return the smallest and the largest value of a symbolic size; None is unbounded."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    # torch assumes sizes of 2 or more while it traces, and exported modules also run with 1.
    lower = 1 if bounds.lower <= 2 else int(bounds.lower)
    upper = int(bounds.upper) if bounds.upper.is_Integer else None
    # torch writes "no limit" as its largest integer.
    return lower, None if upper is None or upper >= 2**62 else upper


def register_quantized_ops() -> None:
    """Define the ``quantized_decomposed`` operators, which a saved reference is made of."""
    # In torch up to now these are defined when this module is imported, and only then.
    importlib.import_module("torch.ao.quantization.fx._decomposed")


def patch_inductor_config(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Set values of ``torch._inductor.config`` inside a ``with`` block."""
    from versatil_passes._torch_compat import patch_inductor_config as patch

    return patch(dict(values))


def set_inductor_config(values: Mapping[str, Any]) -> None:
    """Set values of ``torch._inductor.config`` for good.

    From torch 2.12 on the configuration belongs to the current thread.
    """
    config = importlib.import_module("torch._inductor.config")
    for name, value in values.items():
        *parents, last = name.split(".")
        owner: Any = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, last, value)


def inductor_config() -> dict[str, Any]:
    """Return a copy of ``torch._inductor.config``."""
    config = importlib.import_module("torch._inductor.config")
    return dict(config.get_config_copy())


@contextmanager
def keep_pre_grad_pass() -> Iterator[None]:
    """Put ``torch._inductor.config.pre_grad_custom_pass`` back at the end of the block."""
    config: Any = importlib.import_module("torch._inductor.config")
    before = config.pre_grad_custom_pass
    try:
        yield
    finally:
        # Not touched if it is as before: assigning would mark the value as set by a user.
        if config.pre_grad_custom_pass is not before:
            config.pre_grad_custom_pass = before


def is_static_input(value: Any) -> bool:
    """Whether Dynamo marked an input of its graph as a parameter or buffer."""
    return (
        isinstance(value, torch.Tensor)
        and getattr(value, "_dynamo_static_input_type", None) is not None
    )


def forget_dynamo_inputs(module: torch.fx.GraphModule) -> None:
    """Make AOTAutograd take the inputs as they are, not as Dynamo listed them when it traced."""
    module.meta.pop("dynamo_compile_id", None)


def compile_with_inductor(
    module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Run the pre-grad passes in force on a graph, and compile it with Inductor.

    Inductor would run them itself, but some versions (2.9) have dropped the fake values by then,
    and a pass that fails would be reported as a failure of Inductor.
    """
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    _run_pre_grad_passes(module)
    with patch_inductor_config({"pre_grad_custom_pass": None}):
        compiled: Callable[..., Any] = compile_fx.compile_fx(module, list(inputs))
    return compiled


def _run_pre_grad_passes(module: torch.fx.GraphModule) -> None:
    config: Any = importlib.import_module("torch._inductor.config")
    slot = config.pre_grad_custom_pass
    for graph_pass in slot if isinstance(slot, (list, tuple)) else [slot] if slot else []:
        graph_pass(module.graph)
    module.recompile()


def is_traced_elsewhere(error: Exception) -> bool:
    """Whether Dynamo refused a call since something is traced; it asks the process, not the thread."""
    return "symbolically trace a dynamo-optimized function" in str(error)


def compile_lock() -> AbstractContextManager[Any]:
    """Keep other threads from compiling inside a ``with`` block; Dynamo takes the same lock."""
    lock: AbstractContextManager[Any] = importlib.import_module(
        "torch._dynamo.convert_frame"
    ).compile_lock
    return lock


def compile_ahead_of_time(
    module: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, bytes]:
    """Run the pre-grad passes in force on an exported module, and compile it with AOTInductor.

    Args:
        module: Exported, without guards; it is changed.
        args: Example inputs with the strides that inputs will have.
        kwargs: The same, by name.

    Returns:
        Name -> content of the archive that AOTInductor would write.
    """
    inductor: Any = importlib.import_module("torch._inductor")
    packages: Any = importlib.import_module("torch._inductor.package")
    _run_pre_grad_passes(module)
    buffer = io.BytesIO()
    # A folder of its own: two processes that compile one model would write the same files.
    with (
        tempfile.TemporaryDirectory(prefix="versatil_") as folder,
        patch_inductor_config(_ahead_of_time_values()),
    ):
        options = {"aot_inductor.package": True, "aot_inductor.output_path": folder}
        files = inductor.aot_compile(module, tuple(args), dict(kwargs), options=options)
        packages.package_aoti(buffer, files)
    with zipfile.ZipFile(buffer) as archive:
        return {
            name: archive.read(name)
            for name in archive.namelist()
            # A random number, which would make each archive another.
            if not name.endswith("/.data/serialization_id")
        }


def _ahead_of_time_values() -> dict[str, Any]:
    config: Any = importlib.import_module("torch._inductor.config")
    values: dict[str, Any] = {
        "pre_grad_custom_pass": None,
        # torch notes things about the last package here, and leaves them.
        "aot_inductor.metadata": {},
        "aot_inductor.model_name_for_generated_files": "model",
    }
    # Newer ones make the code three times as large, for debuggers.
    if hasattr(config.aot_inductor, "enable_line_tables"):
        values["aot_inductor.enable_line_tables"] = False
    return values


class NativeModel:
    """A shared library that AOTInductor made, loaded into this process.

    It checks nothing: tensors of other shapes, strides or dtypes than it was made for are read
    beyond their end.

    Attributes:
        structure: How its inputs nest.
    """

    def __init__(self, library: str) -> None:
        """Load and run the code in the file ``library``, which may be deleted afterwards."""
        aoti = torch._C._aoti  # noqa: SLF001 -- torch's own loader imports all of Inductor
        self._runner = aoti.AOTIModelContainerRunnerCpu(library, 1)
        inputs, outputs = self._runner.get_call_spec()
        self.structure = CallStructure(pytree.treespec_loads(inputs))
        self._results = pytree.treespec_loads(outputs)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run it on contiguous tensors; constants among the inputs are left out."""
        return pytree.tree_unflatten(self._runner.run(list(tensors)), self._results)


class CallStructure:
    """How the inputs of an exported model nest."""

    def __init__(self, spec: Any) -> None:
        """Take it from what torch keeps."""
        self.count: int = spec.num_leaves
        self._nested = pytree.tree_unflatten([None] * spec.num_leaves, spec)
        _, self._spec = pytree.tree_flatten(self._nested)

    @classmethod
    def of_module(cls, module: torch.fx.GraphModule) -> "CallStructure":
        """Take it from an exported module."""
        return cls(module._in_spec)  # noqa: SLF001 -- see unflatten_for_call

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Flatten inputs, in whichever order names are given; None if they nest otherwise."""
        inputs = (tuple(args), dict(kwargs))
        leaves, spec = pytree.tree_flatten(inputs)
        if spec != self._spec:
            leaves, spec = pytree.tree_flatten(_in_order(inputs, self._nested))
        return list(leaves) if spec == self._spec else None

    def __str__(self) -> str:
        args, kwargs = self._nested
        by_name = f" and by name {', '.join(kwargs)}" if kwargs else ""
        return f"{len(args)} by position{by_name}"


def _in_order(value: Any, like: Any) -> Any:
    """Bring the keys of dictionaries into the order of another nested value."""
    if type(like) is dict and type(value) is dict and value.keys() == like.keys():
        return {key: _in_order(value[key], like[key]) for key in like}
    if type(like) in {tuple, list} and type(value) is type(like) and len(value) == len(like):
        return type(value)(map(_in_order, value, like))
    return value


def dynamic_shapes_for_call(module: torch.fx.GraphModule, leaves: Sequence[Any]) -> Any:
    """Arrange one shape specification per input as ``torch.export.export`` wants them.

    That is one specification for each parameter of the module's ``forward``, by position.
    """
    args, kwargs = unflatten_for_call(module, [*map(_Leaf, leaves)])
    unwrapped = pytree.tree_map(lambda leaf: leaf.value, (args, kwargs))
    return (*unwrapped[0], *unwrapped[1].values())


class _Leaf:
    """Hides a specification, which may itself be a mapping, from pytree."""

    def __init__(self, value: Any) -> None:
        self.value = value


def copy_graph_module(
    module: torch.fx.GraphModule, kind: type[torch.fx.GraphModule] = torch.fx.GraphModule
) -> torch.fx.GraphModule:
    """Return a module of a ``kind``, with a graph of its own and the same tensors and submodules.

    ``copy.deepcopy`` would do, if torch did not warn about its own classes while it copies the
    description of the inputs (from 2.12 on).
    """
    graph = torch.fx.Graph()
    copied: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    graph.output(copied[0]).meta = dict(copied[1].meta)
    # It holds how inputs are flattened, and is only read.
    graph.set_codegen(module.graph._codegen)  # noqa: SLF001 -- has a setter, but no getter
    result = kind(module, graph)
    result.meta = dict(module.meta)
    return result


def clone_tensors(module: torch.fx.GraphModule) -> None:
    """Give a copied module tensors of its own."""
    for owner in module.modules():
        for kept in (owner._parameters, owner._buffers):  # noqa: SLF001 -- assigning would check types
            kept.update({name: _clone(value) for name, value in kept.items()})


def _clone(value: Any) -> Any:
    if value is None:
        return None
    clone = value.detach().clone()
    is_parameter = isinstance(value, torch.nn.Parameter)
    return torch.nn.Parameter(clone, value.requires_grad) if is_parameter else clone


def run_and_get_code(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function, and also return the source of what Inductor compiles meanwhile."""
    from torch._inductor.utils import run_and_get_code as run

    result, codes = run(function)
    return result, codes


def load_inductor_patterns() -> None:
    """Import the modules of Inductor that register patterns when they are first imported."""
    for name in ("joint_graph", "post_grad", "pre_grad", "freezing_patterns"):
        importlib.import_module(f"torch._inductor.fx_passes.{name}")


def pattern_count() -> int:
    """Return how many patterns are registered with Inductor, in all tables of the process."""
    matcher = importlib.import_module("torch._inductor.pattern_matcher").PatternMatcherPass
    tables = [table for table in gc.get_objects() if type(table) is matcher]
    return sum(len(found) for table in tables for found in table.patterns.values())
