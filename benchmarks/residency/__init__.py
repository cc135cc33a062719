"""What changing versions while serving is worth, and what it costs."""
