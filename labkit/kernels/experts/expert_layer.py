"""The expert layer as one calls it: whichever of the lab's kernels are the fastest for its tokens and weights.

| tokens | weights            | kernels                                                       |
|--------|--------------------|---------------------------------------------------------------|
| many   | bf16, INT4         | tiled.py: sorted by expert, two grouped GEMMs                 |
| some   | bf16               | wide.py: the same, blocks of one expert as one tile           |
| one    | bf16, INT4         | one_token.py: two matrix-vector products                      |
| one    | INT4, many of them | one_token_words.py: the same with fewer instructions a weight |

`choose.choose_any` chooses; page 04 shows what each choice is worth. Not chosen, but called by name:

| tokens | weights       | kernels                                                                             |
|--------|---------------|-------------------------------------------------------------------------------------|
| few    | INT4 (bf16 x) | few_rows.py: words as fragments of matrix instructions, where an expert is large    |
| few    | INT4 (bf16 x) | specialised.py: on Hopper, the same by warps that copy and warps that multiply      |
"""

from labkit.kernels.experts import one_token, one_token_words, routing, wide
from labkit.kernels.experts.choose import Choice, Joined, WordChoice, check_choice, choose_any
from labkit.kernels.experts.inputs import Layer, LayerInputs, Workspace, _part, check_layer, workspace
from labkit.kernels.experts.tiled import by_tiles
from labkit.kernels.target import has_dependent_launch


def layer(
    x: LayerInputs, config: Choice | None = None, scratch: Workspace | None = None, check_ids: bool = False
) -> Layer:
    """out = Σ_j weights[:, j] · w2[e] (SiLU(gate) · up) with [gate, up] = w1[e] x and e = ids[:, j], as launches.

    config: None: `choose.choose_any`, from this GPU's tuned table or by a rule. scratch: shared by layers that run one
    after the other; None: x's own. What is in x's tensors may change between calls, their sizes may not: a captured
    graph serves fewer tokens with ids of -1.
    check_ids: raise ValueError now for ids out of range, which waits for the GPU; else such slots add nothing.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_layer(x)
    T, E, top_k, _, width = x.shape
    config = choose_any(*x.shape, x.int4, x.x.device) if config is None else config
    check_choice(config, x.int4)
    scratch = workspace(x) if scratch is None else scratch
    if scratch.tokens < T:
        raise ValueError(f"x has {T} tokens; allowed: up to {scratch.tokens}, for which the scratch was made")
    if isinstance(config, Joined):
        return wide.joined(x, config, scratch, check_ids)
    if not config.rows:
        return by_tiles(x, config, scratch, check_ids)
    if T > 1:
        raise ValueError(f"config.rows is {config.rows} with {T} tokens; allowed: only for one token, else None")
    hidden = _part("hidden", scratch.hidden, top_k * width, x)
    dependent = config.dependent and has_dependent_launch(x.x.device)
    made = (one_token_words if isinstance(config.rows, WordChoice) else one_token).launches(
        x, hidden, config.rows, dependent
    )
    return Layer(config, routing.one_token(x.ids, E, config.block_m, check_ids), made)
