"""Convert an extent's bytes to numbers and back: affine codes, and the exponent codec of lossless BF16."""
