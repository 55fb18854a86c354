"""The TensorBoard dashboard: what each logged key means, which charts show it, and the logger that writes both."""

from app.dashboard.logger import DashboardLogger

__all__ = ["DashboardLogger"]
