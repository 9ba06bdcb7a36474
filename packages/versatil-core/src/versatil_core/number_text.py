"""Numbers as people read them: sizes, times, ratios, dB."""

import math


def file_size(size: float) -> str:
    """Show bytes.

    Example:
        >>> file_size(2_400_000)
        '2.4 MB'
        >>> file_size(24_300)
        '24 kB'
    """
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Show a time with three digits.

    Example:
        >>> duration(0.0123), duration(0.0000042), duration(12.3)
        ('12.3 ms', '4.20 us', '12.3 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:  # what would be shown as 1000 of the smaller unit
            return f"{three_digits(seconds / factor)} {unit}"
    return f"{three_digits(seconds / 1e-6)} us"


def three_digits(value: float) -> str:
    """Round to three digits, from 1 to 999.

    Example:
        >>> three_digits(1.234), three_digits(12.34), three_digits(123.4)
        ('1.23', '12.3', '123')
    """
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def faster(speedup: float) -> str:
    """Say it the plain way round also when int8 loses.

    Example:
        >>> faster(2.0), faster(0.5)
        ('2.00x faster', '2.00x slower')
    """
    return f"{speedup:.2f}x faster" if speedup >= 1 else f"{1 / speedup:.2f}x slower"


def decibel(db: float) -> str:
    """Show an SQNR; equal tensors have an infinite one.

    Example:
        >>> decibel(38.22), decibel(float("inf")), decibel(float("-inf"))
        ('38.2 dB', 'equal', 'nothing in common')
    """
    if db == math.inf:
        return "equal"
    return "nothing in common" if db == -math.inf else f"{db:.1f} dB"


def percent(share: float) -> str:
    """Show a share; a small one is not rounded to nothing.

    Example:
        >>> percent(0.123), percent(0.00004), percent(0.0)
        ('12.3 %', '0.004 %', '0 %')
    """
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %"


def counted(number: int, noun: str) -> str:
    """Show a number of things.

    Example:
        >>> counted(1, "core"), counted(2, "core"), counted(2, "batch")
        ('1 core', '2 cores', '2 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Show a shape.

    Example:
        >>> shape_text((8, 3, 224))
        '8x3x224'
    """
    return "x".join(map(str, shape))
