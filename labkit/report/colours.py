"""Which colour stands for what, on all pages: of each name, a place in `plots.SERIES`.

A library has a colour of its own, and so has each of the lab's variants that stand side by side. Controls are grey.
Names that are not here take what a figure leaves free.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain, cycle

# Places of plots.SERIES: blue, orange, green, pink, violet, olive, teal, dark red, grey, brown. First match counts.
CONTROLS: Mapping[str, int] = {
    r"\bceiling\b|\bplain read\b|in-place multiply": 8,
    r"look-ups alone|\(wrong\)|the step alone": 8,
}
LIBRARIES: Mapping[str, int] = {
    r"\bcuBLAS\b|\btorch\.|\bPyTorch\b|\bF\.grouped_mm\b|^loop, eager": 1,
    r"\bSGLang\b": 3,
    r"\bfla(-core)?\b|\bliger-kernel\b": 5,
    r"\battn-gym\b": 6,
    r"\bvLLM\b": 7,
    r"\bFlashInfer\b|\bllama\.cpp\b": 9,
}
OURS: Mapping[str, int] = {
    # the state's layout; tiles, and the order of slots, by marker and dash
    r"\[V, K\]": 0,
    r"\[K, V\]": 2,
    # a state that is seldom written, a prompt in segments
    r"^this lab, (ring|segments|L = |fastest)|^this lab$": 0,
    r"^this lab, (state written|one segment)": 2,
    # one GEMV, and a chain of them
    r"^separate kernels": 2,
    r"^dependent launch": 0,
    r"ordinary launch": 2,
    r"^loads of 16 bytes": 6,
    # how a decode's tables come to the GPU
    r"^position on the GPU|^tables$|^tables without waits": 0,
    r"^rebuilt vectorised": 1,
    r"^tables kept, pinned": 2,
    r"^4-byte writes, packed": 3,
    r"^position in the launch": 4,
    r"^tables kept, pageable": 5,
    r"^4-byte writes, kernel": 6,
    r"^rebuilt in Python": 7,
    r"^4-byte writes, singly": 9,
    # products with several tokens, dense and routed
    r"^tensor_core|matrix instructions$": 0,
    r"^weight_stationary|^grouped_indexed$": 2,
    r"^per_token": 4,
    r"^gemm_n|^grouped_indexed, integers": 6,
    r"^grouped_rowcopy": 9,
    # expert layers, and their grids; the bits of ExecuTorch's too, before and after the change
    r"^lab$|one CTA an SM": 0,
    r"as many CTAs as fit": 2,
    r"\bW4A16\b": 4,
    r"\bW4A8\b": 5,
    # of launches
    r"^Triton, empty kernel": 0,
}
VALUES: Mapping[str, int] = {  # what variants are measured with
    r"\bF32$": 0,
    r"^BF16$|read once, BF16$": 1,
    r"^Q8_0$": 2,
    r"^Q4_K$": 3,
    r"^Q5_K$": 4,
    r"^Q6_K$": 5,
    r"tile 8$": 0,
    r"tile 32$": 2,
    r"tile 16$": 5,
}
KNOWN = CONTROLS | LIBRARIES | OURS | VALUES


def place(name: Hashable, among: Mapping[str, int] = KNOWN) -> int | None:
    """The place of a name's colour; None if it has none."""
    return next((place for pattern, place in among.items() if re.search(pattern, str(name))), None)


def places(names: Sequence[Hashable], count: int) -> list[tuple[int, int]]:
    """Of each of a figure's names the place of its colour, of `count`, and how many before it have the same one.

    A name without a colour takes the first that no other of the figure has; names of one colour differ in the second
    number, for marker, dash or hatch to tell.
    """
    known = [place(name) for name in names]
    free = chain([spare for spare in range(count) if spare not in known], cycle(range(count)))
    chosen = [next(free) if one is None else one for one in known]
    return [(one, chosen[:index].count(one)) for index, one in enumerate(chosen)]
