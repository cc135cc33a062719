"""How long it takes to bring a layer's experts to where they run, from backends of different speed. Pure arithmetic.

fluxmoe, section 4.2 and equations 6 to 10. A backend is a place that experts are brought from: device memory, where
they are compressed, or the host. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(rates: Sequence[float]) -> list[float]:
    """The share of a layer's bytes that each backend should hold so that all end together: x_k = B_k / sum B (8).

    Args:
        rates: bytes a second of each backend, above 0.
    """
    whole = sum(rates)
    return [rate / whole for rate in rates]


def layer_seconds(sizes: Sequence[float], rates: Sequence[float], together: bool = True) -> float:
    """Seconds that a layer's loading takes: tau_k = bytes_k / B_k (6), and the slowest backend's (9).

    Args:
        sizes: bytes that come from each backend.
        rates: bytes a second of each.
        together: whether backends work beside one another, as a bus and a GPU do; those that share a processor's cores
            take from each other, and their times add up.
    """
    times = [size / rate for size, rate in zip(sizes, rates, strict=True)]
    return max(times, default=0.0) if together else sum(times)


def pass_seconds(layers: Sequence[Sequence[float]], rates: Sequence[float], together: bool = True) -> float:
    """Seconds of loading that a pass asks for (10): `layers` are bytes by layer and backend."""
    return sum(layer_seconds(sizes, rates, together) for sizes in layers)
