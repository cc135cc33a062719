"""Which version of each expert is where, and how that changes while the model is served."""
