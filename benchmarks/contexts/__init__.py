"""Whole models by depth of the context, beside llama.cpp."""
