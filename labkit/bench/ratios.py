"""A ratio of times in words: how much faster, or slower. Every number is noted, so that its origin can be found."""

from collections.abc import Iterable

from labkit.bench.ledger import say

SAME = "as fast"  # of what reads as 1.00


def number(value: float, form: str = "{:.2f}") -> str:
    """A number in a sentence, noted as it was before it is rounded: by that its origin is found."""
    say(value)
    return form.format(value)


def faster(ratio: float, than: str = "") -> str:
    """How much faster something is than what takes `ratio` times its time: "1.29× faster", "1.10× slower than cuBLAS".

    Of what reads as 1.00 no side is said, which would mean nothing: "as fast", "as fast as cuBLAS".
    """
    side = _side(ratio)
    said = f"{_size(ratio)}× {side}" if side else SAME
    return compared(said, than) if than else said


def between(low: float, high: float, than: str = "") -> str:
    """The least and the most that something is faster: "1.06× to 1.22× slower", "1.02× slower to 1.06× faster"."""
    ends = (high, low) if high < 1 else (low, high)  # of slower ones the least first too
    side = _side(low)
    if side != _side(high):
        said = " to ".join(map(faster, ends))
    elif not side:
        said = SAME
    else:
        ends = ends[:1] if _reads(low) == _reads(high) else ends
        said = f"{' to '.join(f'{_size(end)}×' for end in ends)} {side}"
    return compared(said, than) if than else said


def compared(said: str, than: str) -> str:
    """How much faster, as `faster` and `between` say it, than what: "1.29× faster than cuBLAS", "as fast as cuBLAS"."""
    return f"{said} {'as' if said.endswith(SAME) else 'than'} {than}"


def note_sizes(ratios: Iterable[float]) -> None:
    """Note ratios as sentences will say them, for sentences that are made where nothing is noted."""
    for ratio in ratios:
        say(_large(ratio))


def _side(ratio: float) -> str:
    """ "faster" or "slower"; empty of what reads as 1.00."""
    return "" if _reads(ratio) == "1.00" else "faster" if ratio > 1 else "slower"


def _size(ratio: float) -> str:
    """How often the smaller time goes into the larger, noted: "1.29"."""
    return number(_large(ratio))


def _reads(ratio: float) -> str:
    """The same, not noted."""
    return f"{_large(ratio):.2f}"


def _large(ratio: float) -> float:
    return max(ratio, 1 / ratio)
