"""The reports of an audit: text for a terminal, JSON for tools, one HTML page for people."""

from app.audit.report.html import page
from app.audit.report.json import from_json, to_json
from app.audit.report.text import terminal

__all__ = ["from_json", "page", "terminal", "to_json"]
