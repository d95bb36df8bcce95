"""`paceline report`: one self-contained HTML file about a run."""

from launch.report.page import render, write_report

__all__ = ["render", "write_report"]
