"""Where torchao keeps what a quantizer says of a node."""

ANNOTATION = "quantization_annotation"
"""Key in ``node.meta``."""
