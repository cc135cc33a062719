"""Extents on the host: read from the bundle's files and checked, or kept in pinned memory."""
