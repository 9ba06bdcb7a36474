"""Writes a float model as an exported program: to be run in another process, or to see how large it is."""

from pathlib import Path

import torch

from versatil_core.export import ModelInputs, tracing


def save_float_program(model: torch.nn.Module, call: ModelInputs, path: Path) -> None:
    """Export a float model for fixed sizes, and write it.

    Whatever ``torch.export.export`` raises goes to the caller.

    Args:
        model: In eval mode; it is not changed.
        call: Inputs of the sizes that the program takes; they are not kept in the file.
        path: The file.
    """
    with torch.no_grad(), tracing:
        program = torch.export.export(model, call.args, dict(call.kwargs))
    program.example_inputs = None  # data, no part of the model
    torch.export.save(program, path)
