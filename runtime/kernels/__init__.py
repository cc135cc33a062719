"""Kernels: products and decoding straight from packed bytes. This folder imports only `pack` of moepack."""
