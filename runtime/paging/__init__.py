"""Expert paging: weights that have an address always, and memory while their layer runs."""
