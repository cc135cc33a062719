"""Units of quantising work, with the same bytes wherever they run: expert batches and row shards of dense matrices."""
