"""A lab that settles claims about GPU inference kernels: kernels, float64 references, honest timing, evidence."""

__version__ = "0.1.0"
