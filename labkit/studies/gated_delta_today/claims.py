"""The published claims of the study, with the rules by which `bench/claim.py` judges them."""

from labkit.bench.claim import Claim
from labkit.bench.spec import Case

CLAIMS: tuple[Claim, ...] = ()


def pairs(x: Case) -> list[tuple[str, str]]:
    """The pairs of variants that the claims are about."""
    return []
