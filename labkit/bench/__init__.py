"""How long, on what, and how sure."""
