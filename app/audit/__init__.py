"""The audit: why do engine and trainer give different log-probabilities to the same tokens?"""
