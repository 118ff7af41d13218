"""Decoding by a way to keep the tables, or by the chain of kernels."""

from functools import partial

from labkit.kernels.decoder import step
from labkit.studies.persistent_tables import variants, ways

VALID = [name for name in ways.WAYS if name != variants.ONE_POSITION]


def generate(way, prompt, count, start=0):
    """`step.generate` by anything that has the memory, begin and step of a way."""
    way.begin(start)
    return step.generate(way.memory, lambda position: partial(way.step, position), prompt, count, start)
