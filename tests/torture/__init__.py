"""Tests that take minutes: `make torture` runs them whole, `make test` a part of each."""
