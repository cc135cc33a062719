"""moepack: a Mixture-of-Experts model with every expert at several precisions."""

__version__ = "0.1.0"
