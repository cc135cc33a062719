"""Units of quantising work: expert batches and row shards of dense matrices. Their bytes are equal on every machine."""
