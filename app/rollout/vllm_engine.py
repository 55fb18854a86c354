"""The place that configurations of earlier versions name for the engine."""

from app.engine.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
