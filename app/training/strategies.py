"""The place that configurations of earlier versions name for the strategies."""

from app.distributed.strategies import CPUZeroStrategy, ZeroStrategy

__all__ = ["CPUZeroStrategy", "ZeroStrategy"]
