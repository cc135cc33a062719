"""The policies, which choose the placement of each expert: pure code, one file for each policy."""
