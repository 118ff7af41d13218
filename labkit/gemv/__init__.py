"""The production GEMV, y = W x + bias: a module that any study may use."""
