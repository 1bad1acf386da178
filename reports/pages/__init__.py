"""Findings, words and figures as files: HTML, Markdown, LaTeX, CSV and JSON."""
