"""Bytes of an extent to numbers and back: affine codes, and the exponent codec of lossless BF16."""
