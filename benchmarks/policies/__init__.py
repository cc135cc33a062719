"""All policies side by side, and what their papers claim."""
