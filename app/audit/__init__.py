"""The audit: why do log-probabilities of the same tokens differ between engine and trainer?"""
