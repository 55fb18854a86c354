"""Formulas in torch alone: nothing here needs the trainer or the engine."""
