"""Expert paging: experts can always be found, but their weights have memory only while their layer runs."""
