"""Study 02: GEMV, what coalescing is worth, and how many rows a program should take."""
