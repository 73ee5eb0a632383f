"""Fires, analyses and campaigns for people: the terminal, and one self-contained HTML file. Torch-free."""

from firetower.report.pages import analysis_html, campaign_html, fire_html, fires_html
from firetower.report.records import FireView
from firetower.report.terminal import analysis_lines, campaign_lines, fire_lines, fires_lines

__all__ = [
    "FireView",
    "analysis_html",
    "analysis_lines",
    "campaign_html",
    "campaign_lines",
    "fire_html",
    "fire_lines",
    "fires_html",
    "fires_lines",
]
