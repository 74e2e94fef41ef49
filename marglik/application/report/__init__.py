"""A report on runs: one HTML page that needs only a browser."""

from marglik.application.report.page import write_report

__all__ = ["write_report"]
