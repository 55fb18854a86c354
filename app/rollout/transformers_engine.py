"""The place that configurations of earlier versions name for the engine."""

from app.engine.transformers_engine import TransformersEngine

__all__ = ["TransformersEngine"]
