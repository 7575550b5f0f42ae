"""The offline batch job: sources, splitting, encoding, progress."""
