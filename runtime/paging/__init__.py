"""Expert paging: weights always have an address, but memory only while their layer runs."""
