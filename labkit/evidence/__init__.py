"""Why: compiled code, memory access patterns, and the roofline."""
