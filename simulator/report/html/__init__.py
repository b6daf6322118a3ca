"""The report as one self-contained page, and two reports side by side."""

from simulator.report.html.page import save_html

__all__ = ["save_html"]
