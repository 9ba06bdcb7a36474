"""Which modules a pattern such as ``encoder.layers.*.mlp`` stands for."""

from fnmatch import fnmatchcase


def is_matched(module_path: str, pattern: str) -> bool:
    """Whether a pattern names a module, or a container that the module is in.

    Args:
        module_path: Dotted name as in ``named_modules()``; ``""`` is the whole model.
        pattern: A dotted name each part of which may have the wildcards of :mod:`fnmatch`, which
            never reach over a dot; ``""`` stands for everything.

    Example:
        >>> is_matched("encoder.layers.3.mlp.0", "encoder.layers.*.mlp")
        True
        >>> is_matched("encoder.layers.3.attention", "encoder.layers.*.mlp")
        False
    """
    if not pattern:
        return True
    wanted, parts = pattern.split("."), module_path.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted))
