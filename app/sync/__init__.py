"""Weights to an engine, and the proof that they arrived.

How weights travel is a file each; today there is one way, in process: `synchroniser.py` hands them to
`Engine.load_weights` one at a time. A new transport stands beside it.
"""
