"""What one token's INT4 layer by words compiles to: few instructions a weight, and no shared memory in its loop."""

import re

import compiled_once
import pytest
import torch

from labkit.bench.spec import Case
from labkit.evidence import compiled
from labkit.kernels import offline
from labkit.kernels.experts import choose, one_token_words
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.studies.moe_persistent_grid import models, study, variants

BY_WORDS = (models.QWEN3_30B, models.QWEN3_NEXT, models.MIXTRAL)  # models whose layers take words


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
    with offline.offline(90):
        return one_token_words.launches(item, hidden, choose.by_words(model.top_k, width), True)


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


@pytest.mark.parametrize("model", BY_WORDS, ids=lambda model: model.name)
def test_weights_take_few_instructions_and_nothing_goes_through_shared_memory(model):
    for launch in launches(model).values():
        found = compiled_once.evidence(launch, 90)
        assert not found["matrix"]
        assert found["spill_bytes"] == 0
        rows = launch.args["ROWS"] * (2 if "out" not in launch.args else 1)  # gate and up, or down
        assert found["loads"]["128"] >= rows  # one a row
        assert found["barriers"] == (0 if found["num_warps"] == 1 else 4)
        assert found["ctas_per_sm"] * found["num_warps"] >= 12
        a_thread = rows * launch.args["BLOCK"] * GROUP / (32 * found["num_warps"])  # weights
        inside = loop(instructions(launch))
        assert not [text for text in inside if re.search(r"\b(LDS|STS|LDSM|STSM|BAR)\b", text)]
        assert len(inside) < 3.5 * a_thread
        assert found["instructions"] < (4.1 if not inside else 4.8) * a_thread


def test_both_launches_are_compiled_ahead():
    shape = models.QWEN3_30B.as_dict() | {"T": 1, "routing": "uniform", "activations": "bf16", "E": 8}
    cases = [Case("layer", shape | {"weights": weights}) for weights in ("INT4", "bf16")]
    assert variants.WORDS in [line.name for line in variants.lines(cases[0])]
    sources = [
        made for made in study.STUDY.kernels(cases, 90, "") if "down_k" in (made[1].get("choice", {}).get("rows") or {})
    ]
    found = [launch for made in sources for launch in compiled.launch_of(made, 90)]
    assert [launch.grid for launch in found] == [(192, 8), (256,)]
    assert all(launch.options["launch_pdl"] for launch in found)
    assert all(launch.args["DEPENDENT"] for launch in found)
    assert not any(launch.options.get("launch_pdl") for made in sources for launch in compiled.launch_of(made, 80))


def test_a_layer_takes_words_where_a_tokens_experts_have_many_weights():
    cpu = torch.device("cpu")
    known = (*BY_WORDS, models.QWEN35_35B)
    found = {m.name: choose.choose_any(1, m.experts, m.top_k, m.hidden, m.width, True, cpu).rows for m in known}
    blocks = {name: rows.down_k for name, rows in found.items() if isinstance(rows, choose.WordChoice)}
    assert blocks == {models.QWEN3_30B.name: 8192, models.QWEN3_NEXT.name: 8192, models.MIXTRAL.name: 2048}
    for tokens, int4 in ((1, False), (2, True)):
        some = (tokens, models.MIXTRAL.experts, 2, 4096, 14336, int4, cpu)
        assert choose.choose_any(*some) == choose.choose(*some)
