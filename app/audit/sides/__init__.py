"""Log-probabilities of the same tokens from each side, as configured and under other conditions."""
