"""Jobs beyond one machine."""
