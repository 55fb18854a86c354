"""Strategies, gradients, processes and stop signals."""
