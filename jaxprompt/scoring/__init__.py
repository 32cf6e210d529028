"""Losses on the device; decisions and metrics on the host."""


def ratio(part: float, whole: float, otherwise: float = 0.0) -> float:
    """Returns the share of a part, `otherwise` of nothing."""
    return float(part / whole) if whole else otherwise
