"""Puts back the buffers that running a model changes, such as a counter or a hidden state."""

import torch


class KeptBuffers:
    """The buffers of some modules, as they are now."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        """Copy them."""
        self._kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]

    def keep_changed(self) -> int:
        """Forget those that are still as they were, and return how many are left."""
        self._kept = [
            (buffer, before) for buffer, before in self._kept if not torch.equal(buffer, before)
        ]
        return len(self._kept)

    def restore(self) -> None:
        """Give the buffers the values that they had."""
        with torch.no_grad():
            for buffer, before in self._kept:
                buffer.copy_(before)
