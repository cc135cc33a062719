"""Plans of memory, made before anything is allocated: what fits a budget, and the bytes outside the experts."""
