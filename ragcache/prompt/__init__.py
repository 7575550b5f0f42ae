"""Token ids in order: prefix | chunks | question."""
