"""What the bytes of a bundle mean: descriptors, bit packing, the exponent codec, the writer and the reader.

FORMAT.md beside this file is normative. Nothing here knows how a version was made (`moepack.quantize`) or how it is
served (`moepack.runtime`).
"""
