"""Counts of tokens and parameters as short text."""


def count_text(count: float, gap: str = "") -> str:
    """Round a count to three digits, in k, M, B or T: 1234567 → 1.23M. ``gap``: before the unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:  # three digits of 999,999 are 1M, not 1,000k
            return f"{count / size:.3g}{gap}{unit}"
    return f"{count:.3g}"
