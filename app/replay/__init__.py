"""A skipped step once more."""
