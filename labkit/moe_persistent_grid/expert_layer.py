"""The expert layer as one calls it: whichever of the lab's kernels are the fastest for its tokens and weights.

| tokens | weights            | kernels                                                       |
|--------|--------------------|---------------------------------------------------------------|
| many   | bf16, INT4         | kernels.py: sorted by expert, two grouped GEMMs               |
| one    | bf16, INT4         | one_token.py: two matrix-vector products                      |
| one    | INT4, many of them | one_token_words.py: the same with fewer instructions a weight |

`choose.choose_any` chooses; page 04 shows what each choice is worth.
"""

from labkit.moe_persistent_grid import kernels, one_token_words
from labkit.moe_persistent_grid.choose import Config, Words, choose_any
from labkit.moe_persistent_grid.kernels import Layer, LayerInputs, Workspace, check_layer


def layer(
    x: LayerInputs, config: Config | None = None, scratch: Workspace | None = None, check_ids: bool = False
) -> Layer:
    """As `kernels.layer`, whose arguments these are, with all that there is to choose from.

    config: None: `choose.choose_any`; its rows may be `Words`. Raises ValueError naming the argument, its value and
    what is allowed.
    """
    check_layer(x)
    config = choose_any(*x.shape, x.int4, x.x.device) if config is None else config
    make = one_token_words.layer if isinstance(config.rows, Words) else kernels.layer
    return make(x, config, scratch, check_ids)
