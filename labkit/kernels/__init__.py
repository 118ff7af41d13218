"""Triton kernels for inference that other code may use as they are: they need torch, Triton and nothing else of labkit.

    from labkit.kernels import decoder, experts, gated_delta, gemv, gguf

What each is for, how to call it and how fast it is: README.md beside this file. A function returns a launch (or
several) made ready on the tensors that it was given; calling that enqueues the kernels on the current stream, so that
it can be captured in a CUDA graph. Nothing is allocated or checked when a launch is called.
"""
