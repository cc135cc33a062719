"""Memory in bytes before anything is allocated: what fits a budget, and the bytes outside the experts."""
