"""A skipped step computed once more, to find what was not finite."""
