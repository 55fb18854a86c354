"""Rules, thresholds and non-finite steps, and who may change a run while it runs."""
