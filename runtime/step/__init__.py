"""The step context, which every room of the runtime may import."""
