"""Dry runs: what a build will take."""
