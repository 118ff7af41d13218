"""What one token's INT4 layer by words compiles to: few instructions a weight, and no shared memory in its loop."""

import re

import pytest
import torch

from labkit.bench.spec import Case
from labkit.evidence import compiled
from labkit.moe_persistent_grid import ahead, models, names, one_token_words, study
from labkit.moe_persistent_grid.kernels import LayerInputs
from labkit.moe_persistent_grid.reference import GROUP, Int4

SHAPES = (models.QWEN3_30B, models.QWEN35_35B, models.QWEN3_NEXT, models.MIXTRAL)
SPILLED = {(models.MIXTRAL.name, "gemm1"): 32}  # bytes: its rows are two blocks, of sixteen rows at once


def launches(model, experts=1):
    """For sm_90, with few experts: their number changes no kernel."""
    H, width = model.hidden, model.width

    def weights(n, k):
        packed = torch.empty((experts, n, k // 2), dtype=torch.uint8)
        return Int4(packed, torch.empty((experts, n, k // GROUP), dtype=torch.bfloat16))

    x = torch.empty(1, H, dtype=torch.bfloat16)
    ids = torch.zeros(1, model.top_k, dtype=torch.int32)
    item = LayerInputs(x, ids, torch.empty(1, model.top_k), weights(2 * width, H), weights(H, width), x.clone())
    hidden = torch.empty(model.top_k * width, dtype=torch.bfloat16)
    with compiled.offline(90):
        return one_token_words.launches(item, hidden, one_token_words.CHOICE, True)


def instructions(launch):
    """(address, instruction) of a kernel's code."""
    listing = compiled.listing_of(compiled.build(launch, 90).asm["cubin"])
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(\S.*?);", listing, re.MULTILINE)
    return [(int(address, 16), text) for address, text in lines if not text.startswith("NOP")]


def loop(code):
    """The instructions of the longest loop; all but those of the sums at the end where there is none."""
    back = [(int(found[1], 16), at) for at, text in code if (found := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]
    first, last = max(((to, at) for to, at in back if to < at), key=lambda ends: ends[1] - ends[0], default=(0, 0))
    return [text for at, text in code if first <= at <= last]


@pytest.mark.parametrize("model", SHAPES, ids=lambda model: model.name)
def test_weights_take_few_instructions_and_nothing_goes_through_shared_memory(model):
    for name, launch in launches(model).items():
        spilled = SPILLED.get((model.name, name), 0)
        found = compiled.evidence(launch, 90)
        assert not found["matrix"]
        assert found["spill_bytes"] == spilled
        rows = launch.args["ROWS"] * (2 if "out" not in launch.args else 1)  # gate and up, or down
        assert found["loads"]["128"] >= rows  # one a row
        assert found["barriers"] <= 4
        assert found["ctas_per_sm"] * found["num_warps"] >= (8 if spilled else 12)
        a_thread = rows * launch.args["BLOCK"] * GROUP / (32 * found["num_warps"])  # weights
        inside = loop(instructions(launch))
        assert not [text for text in inside if re.search(r"\b(LDS|STS|LDSM|STSM|BAR)\b", text)]
        assert len(inside) < 3.5 * a_thread
        assert found["instructions"] < (4.1 if not inside else 4.8) * a_thread


def test_it_is_compiled_ahead():
    shape = models.QWEN3_30B.as_dict() | {"T": 1, "routing": "uniform", "activations": "bf16", "E": 8}
    cases = [Case("layer", shape | {"weights": weights}) for weights in ("INT4", "bf16")]
    sources = [source for source in study.kernels(cases, 90) if source[0] == f"{ahead.HERE}:words"]
    assert len(sources) == 1
    assert names.WORDS in study.roles(cases[0])
    found = compiled.launch_of(sources[0], 90)
    assert [launch.grid for launch in found] == [(96, 8), (256,)]
    assert all(launch.options["launch_pdl"] for launch in found)
    assert all(launch.args["DEPENDENT"] for launch in found)
    with compiled.offline(80):
        assert not any(launch.options.get("launch_pdl") for launch in ahead.words(**sources[0][1]))
