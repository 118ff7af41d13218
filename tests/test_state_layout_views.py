"""The production operations of the state layout study: tables, figures and sentences, on rows with made-up times."""

import json
import math

import pytest
import rows as made

from labkit.shapes import QWEN3_NEXT, QWEN35_4B
from labkit.studies.state_layout import production_views as views
from labkit.studies.state_layout import share, study, tables
from labkit.studies.state_layout import variants as names
from labkit.studies.state_layout import views as simple

PARAMETERS = {
    "models": [QWEN3_NEXT.name], "batches": [1, 64, 256], "states": ["fp32", "bf16"], "gates": ["GDN", "KDA"],
    "step_batches": [1, 64, 256], "prefills": ["1 x 512", "1 x 8192", "64 x 128"],
}  # fmt: skip
BEST = names.fla_in_place("KV", 32)
OVER = {  # times over that of the floor; 1.5 for the others
    tables.CEILING: 1.0, names.OURS: 1.05, names.OURS_IN_ORDER: 1.04, names.OURS_KV: 1.26, BEST: 1.155,
    names.ATTENTION_GYM: 1.2, names.released(names.BEFORE): 2.0, names.released(names.AFTER): 1.6,
    names.released(names.VLLM_BEFORE): 2.4, names.released(names.VLLM_AFTER): 2.0,
    names.released(names.VLLM_AFTER, names.UNCHECKED): 2.0,
    names.fla("KV"): 1.4, names.fla("VK"): 1.35, names.TOKENS: 4.2, names.OURS_TRANSPOSED: 1.1,
}  # fmt: skip


def frame(over=None, grid=1.2, **changes):
    times = OVER | (over or {})

    def us(case, variant):
        if case.op == "decode":  # the grid
            return made.layout_us(grid)(case, variant)
        name = variant.options.get("repeats", variant.name)
        layout = 1.1 if case.op == "chunk_state" and name.startswith("KV") else 1.0
        return (2 + study.floor(case).bytes / 3e6) * times.get(name, 1.5) * layout

    return evident(made.make("state_layout", PARAMETERS, us, **changes))


def evident(rows):
    """CTAs of the chunk-state kernel: one more with [V, K] at tiles of 32; drift that grows by one digit."""
    texts = []
    for op, variant, text in zip(rows["op"], rows["variant"], rows["evidence"], strict=True):
        if op == "chunk_state":
            wide = variant.startswith("VK") and "BV=32" in variant
            text = json.dumps({"registers": 128, "shared_bytes": 74_000 if wide else 82_000, "ctas_per_sm": 2 + wide})
        if op == "drift":
            text = json.dumps({"drift": [[tokens, 1e-6 * tokens, 1e-7 * tokens] for tokens in (1, 2, 4)]})
        texts.append(text)
    return rows.assign(evidence=texts)


@pytest.fixture(scope="module")
def rows():
    return frame()


def test_times_are_beside_the_in_place_multiply(rows):
    table = tables.operation_times(rows, "step")
    assert set(table["gate"]) == {"GDN", "KDA"}
    ours = table[table["variant"] == names.OURS]
    assert len(ours) == 12
    assert ours["percent"].tolist() == pytest.approx([100 / 1.05] * 12, rel=2e-3)
    assert "control" not in set(table["role"])
    assert tables.operation_times(rows, "verify")["percent"].isna().all()
    assert tables.operation_times(rows.iloc[:0], "step").empty


def test_the_fastest_library_is_found_in_every_case(rows):
    table = tables.against_best(rows, "step")
    order = table[table["slots"] == "in order"]
    gdn = order[order["gate"] == "GDN"]
    assert set(gdn["best library"]) == {BEST}
    assert gdn["ratio"].tolist() == pytest.approx([1.155 / 1.04] * 6, rel=2e-3)
    assert set(gdn["verdict"]) == {"faster"}
    kda = order[order["gate"] == "KDA"]  # fla-core's kernel in place is for GDN alone
    assert set(kda["best library"]) == {names.fla("VK")}
    pooled = table[table["slots"] == "at random"]
    assert set(pooled["best library"]) == {names.ATTENTION_GYM}
    assert set(pooled[pooled["gate"] == "GDN"]["libraries"]) == {"attn-gym, SGLang, vLLM, FlashInfer"}
    assert set(pooled[pooled["gate"] == "KDA"]["libraries"]) == {"attn-gym, SGLang, vLLM"}
    assert set(gdn["libraries"]) == {"fla-core, attn-gym, FlashInfer"}
    assert pooled["ratio"].tolist() == pytest.approx([1.2 / 1.05] * 12, rel=2e-3)
    without = rows[rows["role"] != "peer"]
    assert tables.against_best(without, "step").empty
    verified = tables.against_best(rows, "verify")  # which SGLang alone offers, of GDN
    assert set(verified["gate"]) == {"GDN"}
    assert set(verified["libraries"]) == {"SGLang"}


def test_errors_of_extend_are_beside_the_librarys(rows):
    table = tables.extend_errors(rows.assign(error=rows["variant"].map({names.OURS: 2e-3, names.fla("VK"): 4e-3})))
    assert len(table) == 5
    assert set(table["ours / fla"]) == {0.5}
    assert tables.extend_errors(rows.iloc[:0]).empty


def test_layouts_of_every_operation(rows):
    table = tables.layouts(rows)
    ours = table[table["kernels"] == "ours"]
    assert set(ours["op"]) == {"step", "verify", "extend"}
    assert ours["ratio"].tolist() == pytest.approx([1.26 / 1.05] * len(ours), rel=2e-3)
    fla = table[table["kernels"] == "fla"]
    assert set(fla["op"]) == {"extend"}
    assert fla["ratio"].tolist() == pytest.approx([1.4 / 1.35] * len(fla), rel=2e-3)


def test_chunk_state_by_form_and_tile(rows):
    table = tables.chunk_states(rows)
    assert set(table["prefill"]) == {"1 x 8192", "64 x 128"}
    assert set(table["form"]) == {"KV", "VK", "VK, transposed"}
    assert len(table) == 2 * 7
    pairs = tables.chunk_state_layouts(rows)
    assert len(pairs) == 2 * 3
    assert pairs["ratio"].tolist() == pytest.approx([1.1] * 6, rel=2e-3)
    more = pairs[pairs["CTAs an SM, VK"] > pairs["CTAs an SM, KV"]]
    assert set(more["BV"]) == {32}
    assert set(more["shared, KV"]) == {82_000}


def test_drift_is_read_from_the_evidence(rows):
    table = tables.drift(rows)
    assert len(table) == 2 * 2 * 2 * 3  # gates, states, layouts, points
    last = table[table["tokens"] == 4]
    assert set(last["output error"]) == {4e-6}
    assert set(last["state error"]) == {4e-7}
    assert tables.drift(made.unusable(rows)).empty


@pytest.mark.parametrize(("view", "said"), [
    ("tuned", "Batch 64 and more: fp32 state: 1.20× faster; bf16 state: 1.20× faster"),
    ("step_percent", "this lab [V, K], batch 64 and more: 95 %"),
    ("step_in_order", "This lab's is faster in 12 of 12 cases, 1.11× to 1.30× faster"),
    ("step_at_random", "This lab's is faster in 12 of 12 cases, 1.14× faster"),
    ("own_code", "[V, K] is faster in 23 of 23 cases, 1.25× faster"),
    ("own_code_vllm", "[V, K] is faster in 27 of 27 cases, 1.20× faster"),
    ("long_prompts", "This lab's is 1.29× to 1.43× faster"),
    ("slots", "In order: 1.01× faster"),
    ("extend", "faster in 5 of 5 cases"),
    ("drift", "After 4 tokens: fp32 state 4.0e-07; bf16 state 4.0e-07"),
])  # fmt: skip
def test_what_a_view_says_follows_from_the_rows(rows, view, said):
    assert said in made.caption(getattr(views, view)(rows))


@pytest.mark.parametrize(("view", "question", "answer"), [
    ("by_kernel", "the lab's plain kernel, tile 8", "fp32: 1.20× faster; bf16: 1.20× faster"),
    ("by_kernel", "SGLang's verify, tile 8", "fp32: 1.25× faster"),
    ("by_kernel", "this lab's decode, tuned for each layout", "fp32: 1.20× faster; bf16: 1.20× faster"),
    ("by_kernel", "this lab's prefill, one launch for both layouts", "1.20× faster"),
    ("libraries", "decode, GDN, fp32 state, slots in order",
     "1.11× faster than the fastest of fla-core, attn-gym and FlashInfer (1.11× faster)"),
    ("verified", "GDN, batch 1, 4 tokens", "4.00× faster"),
    ("first_token", "a whole extend, KDA", "1.20× faster"),
    ("occupancy", "[V, K] has more CTAs an SM", "2 of 6 pairs, 1.10× faster with [V, K]"),
    ("occupancy", "both layouts have as many", "4 of 6 pairs, 1.10× faster with [V, K]"),
])  # fmt: skip
def test_short_answers_follow_from_the_rows(rows, view, question, answer):
    assert getattr(views, view)(rows)[question] == answer


def test_the_first_token_is_an_estimate_from_whole_extends():
    """On a GPU whose peak is not known, extends are all of the prefill."""
    some = without_releases(frame({names.OURS: 1.05, names.OURS_KV: 1.16}).assign(gpu="another"))
    said = views.first_token(some)
    assert said["first token, at most (7.7 % published)"] == f"{100 * (1 - 1.05 / 1.16):.1f} % earlier"


def test_the_plain_kernel_says_both_tiles_and_only_what_was_measured():
    layout = made.make("state_layout", made.LAYOUT, made.layout_us(lambda batch, tile: 1.2 if tile == 8 else 1.0))
    narrow, wide, best = (
        "the lab's plain kernel, tile 8",
        "the lab's plain kernel, tile 32",
        "the same, each layout with",
    )
    said = simple.equal_tiles(layout)
    assert said[narrow] == "fp32: 1.20× faster; bf16: 1.20× faster"
    assert said[wide] == "fp32: as fast; bf16: as fast"
    spilled = simple.equal_tiles(made.spilling(layout, "KV BV=8, 1 warp"))
    assert narrow not in spilled
    assert wide in spilled
    neither = simple.equal_tiles(made.spilling(layout, "KV BV=8, 1 warp", "KV BV=32, 1 warp"))
    assert [name.startswith(best) for name in neither] == [True]
    for nothing in (made.unusable(layout), layout[layout["variant"] == tables.CEILING], layout.iloc[:0]):
        assert simple.equal_tiles(nothing) == {}


@pytest.mark.parametrize(("variant", "shown"), [
    ("KV BV=8, 1 warp", "[K, V], tile 8"), ("VK BV=32, 2 warps, folded", "[V, K], tile 32, 2 warps, one pass"),
    ("ours VK, slots in order", "this lab [V, K], slots in order"), ("sglang 0.5.9 KV", "SGLang 0.5.9 [K, V]"),
    ("fla KV in place, BV=8", "fla-core [K, V] in place, tile 8"), ("in-place multiply", "in-place multiply"),
])  # fmt: skip
def test_variants_have_names_to_show(variant, shown):
    assert simple.named(variant) == shown


def without_releases(rows):
    return rows[~rows["variant"].str.startswith(("sglang", "vllm", "flashinfer"))]


def test_a_library_alone_is_called_by_its_name(rows):
    assert " than fla-core (" in views.libraries(without_releases(rows))["extend, GDN"]


def test_releases_stand_side_by_side_or_the_page_says_what_is_missing(rows):
    table = tables.by_release(rows, 64)
    assert set(table["variant"]) == {
        names.OURS,
        *(names.released(name) for name in names.RELEASES),
        *(names.released(name, "packed") for name in names.PACKED),
        *(names.released(name, "CuTe DSL") for name in names.CUTE),
    }
    assert set(table[table["gate"] == "KDA"]["form"]) == {""}
    shown = views.by_release(rows).table
    assert set(shown["release"]) >= {"this lab, [V, K]", "0.5.9, [K, V]", "0.5.10rc0, [V, K]", "0.5.23, [V, K]"}
    drawn = list(dict.fromkeys(views.by_release(rows).data["release"].str.partition(",")[0]))
    assert drawn == ["this lab", "0.5.9", "0.5.10rc0", "0.5.11", "0.5.23"]  # not by the alphabet
    assert views.by_release(without_releases(rows)).endswith("not measured on this GPU.")
    assert views.own_code(without_releases(rows)).endswith("not measured on this GPU.")
    missing = rows["variant"].str.startswith("sglang")
    reasons = missing.map({True: "NotFetched: not fetched: labkit fetch sglang", False: ""})
    assert views.own_code(rows.assign(reason=reasons, ok=rows["ok"] & ~missing)).endswith(": labkit fetch sglang.")


def test_own_code_is_drawn_by_type_of_the_state_and_no_taller_than_a_screen(rows):
    for view in (views.own_code, views.own_code_vllm):
        drawn = view(rows)
        assert set(drawn.data["kept"]) == {"fp32 state", "bf16 state"}
        assert set(drawn.data.loc[drawn.data["op"] == "extend", "kept"]) == {"fp32 state"}
        assert "kept" not in drawn.table
        assert drawn.fig.get_figheight() * 96 <= 700


def test_a_release_that_takes_the_pool_for_the_other_layout_is_called_wrong(rows):
    misread = rows["variant"] == names.released(names.AFTER, "CuTe DSL")
    some = rows.assign(ok=rows["ok"] & ~misread, error=rows["error"].mask(misread, 1.4))
    said = views.cute_layout(some)
    assert "0.5.9, [K, V]: right" in said
    assert "0.5.10rc0, [V, K]: wrong (error 1.4e+00)" in said
    assert "the file of 0.5.10rc0 and 0.5.11 is that of 0.5.9, byte for byte" in said
    assert "0.5.10rc0, [V, K]: right" in views.cute_layout(rows)


def test_the_extends_share_of_a_prefill():
    """36 layers of 989 µs, and 2 x 3e9 x 8192 operations at 989 TFLOP/s."""
    products = 2 * 3e9 * 8192 / 989e12
    found = share.prefill_share(QWEN3_NEXT, 8192, 989.0, "NVIDIA H100 80GB HBM3")
    assert found == pytest.approx(36 * 989e-6 / (36 * 989e-6 + products))
    assert share.prefill_share(QWEN3_NEXT, 8192, 989.0, "NVIDIA H100 PCIe") == 1.0
    with pytest.raises(ValueError, match=r"active weights of Qwen3\.5-4B"):
        share.prefill_share(QWEN35_4B, 8192, 989.0, "NVIDIA H200")


VIEWS = (
    "tuned", "step_percent", "step_in_order", "step_at_random", "slots", "layouts", "extend", "extend_errors",
    "chunk_states", "drift", "shares",
)  # fmt: skip
ANSWERS = ("by_kernel", "libraries", "verified", "first_token", "occupancy")


def _less(*variants):
    return lambda rows: rows[~rows["variant"].isin(variants)]


PARTIAL = {
    "none": lambda rows: rows.iloc[:0],
    "all failed": made.unusable,
    "the grid only": lambda rows: rows[rows["op"] == "decode"],
    "no grid": lambda rows: rows[rows["op"] != "decode"],
    "KDA only": lambda rows: rows[rows["case"].str.contains('"KDA"')],
    "bf16 only": lambda rows: rows[~rows["case"].str.contains('"state": "fp32"')],
    "batch 1 only": lambda rows: rows[rows["case"].str.contains('"batch": 1,')],
    "no libraries": lambda rows: rows[rows["role"] != "peer"],
    "no ceiling": _less(tables.CEILING),
    "no [K, V]": _less(names.OURS_KV, *(names.chunk_state("KV", tile) for tile in names.CHUNK_STATE_TILES)),
    "no control": lambda rows: rows[rows["role"] != "control"],
    "no evidence": lambda rows: rows.assign(evidence="{}"),
}


@pytest.mark.parametrize("which", PARTIAL)
def test_every_view_of_partial_rows_is_a_sentence_or_a_drawing(rows, which):
    some = PARTIAL[which](rows).reset_index(drop=True)
    made.check_views(views, VIEWS, some)
    for view in ANSWERS:
        said = getattr(views, view)(some)
        assert all(text and "nan" not in text for text in said.values()), view


def test_the_rules_choices_by_batch_and_gpu():
    table = views.choices([1, 64, 512], ["fp32", "bf16"])
    assert table["batch"].tolist() == [1, 64, 512] * 2
    for gpu in ("H100", "H200"):
        programs = table[f"all programs / SMs, {gpu}"]
        assert (programs.groupby(table["state"]).diff().dropna() > 0).all()
    assert table["choice, H100"].iloc[-1] != table["choice, H200"].iloc[-1]


def test_the_share_of_a_dense_model_by_hand():
    """Of Qwen3.5-4B, batch 16 and 2048 tokens: state, cache of 8 attention layers, and all weights once."""
    state = 2 * 16 * 24 * 32 * 128 * 128 * 4
    cache = 16 * 2048 * 8 * 2 * 4 * 256 * 2
    assert share.state_share(QWEN35_4B, 16, 2048) == pytest.approx(state / (state + cache + 2 * QWEN35_4B.total))
    assert QWEN35_4B.total == pytest.approx(8.41e9 / 2, rel=0.01)  # what its source streams a token, in bf16


def test_shares_of_both_models(rows):
    table = views.shares(rows)
    assert set(table["model"]) == {QWEN3_NEXT.name, QWEN35_4B.name}
    assert (table["kernel × faster"] - 1.2).abs().max() < 0.01
    for _, line in table.iterrows():
        part = line["share %"] / 100
        assert line["gain %"] == pytest.approx(100 * (1 / (1 - part + part / line["kernel × faster"]) - 1), rel=1e-6)
    assert not math.isnan(table["gain %"].max())
