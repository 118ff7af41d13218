"""Running notebooks: processes, progress, and the lease of a GPU."""
