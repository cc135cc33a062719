"""A Mixture-of-Experts that speaks English, made on this machine from a small released model.

`python -m benchmarks.real --make` makes it; every benchmark with `--checkpoint` takes it then.
"""
