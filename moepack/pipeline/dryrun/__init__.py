"""Dry runs: what a build will take, measured on the checkpoint, or worked out before its weights are here."""
