"""The meaning of a bundle's bytes: descriptors, bit packing, the exponent codec, the writer and the reader.

FORMAT.md beside this file is normative. `moepack.quantize` makes versions, and `moepack.runtime` serves them.
"""
