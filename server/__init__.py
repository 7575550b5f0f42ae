"""The REST endpoint."""
