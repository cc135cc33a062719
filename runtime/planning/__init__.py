"""Bytes before anything is allocated: what fits a budget, and what is taken outside the experts."""
