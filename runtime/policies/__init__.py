"""Which version of each expert is wanted: pure code, one file a policy."""
