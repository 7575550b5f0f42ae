"""States at rest: forms, codecs, shards, catalog. Knows tensors and files, but no model."""
