"""The experts in a forward pass: their handles, their forward, and the choice of kernels."""
