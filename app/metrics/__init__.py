"""Metrics that are exact over micro-batches, ranks and steps."""

from app.metrics.mismatch import MismatchMetrics, diagnose
from app.metrics.running import RunningStatistics
from app.metrics.state import fused_sync

__all__ = ["MismatchMetrics", "RunningStatistics", "diagnose", "fused_sync"]
