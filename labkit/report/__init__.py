"""Figures, pages and the index."""
