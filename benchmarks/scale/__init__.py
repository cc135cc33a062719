"""Builds on a cluster: measured pieces, and a simulation."""
