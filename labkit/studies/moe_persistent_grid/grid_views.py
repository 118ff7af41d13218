"""Figures and sentences of one GEMM in both grids, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.spec import Case, Study
from labkit.bench.tables import where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.kernels.experts import blocks as experts_blocks
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import interval, rounded, sentences, span
from labkit.report.words import tokens as in_tokens
from labkit.studies.moe_persistent_grid import tables, variants, waves, work
from labkit.studies.moe_persistent_grid.models import MODELS, QWEN35_35B, MoeModel
from labkit.studies.moe_persistent_grid.variants import FILLED, LIVE, PERSISTENT, SOURCE_T, TILES, UNIFORM, released
from labkit.studies.moe_persistent_grid.views import HIDDEN, UNITS, labels, ours_there

ONE_WAVE, FEW_WAVES, MANY_WAVES = 1, 3, 10
FULL = 0.9  # share of the slots' time that is work, up to which a last wave leaves something to win
BAND = 0.01  # a mean ratio nearer to 1 is none
BOTH = "µs, both"  # of the source's own point
GROUPED = "groups of more than 1"  # a change of `tables.own_products`
BLOCK_M = 64  # rows of a block of ExecuTorch's own batched kernels
OWN_PRODUCTS = f"ExecuTorch's own products (1.5.1), blocks of {BLOCK_M} rows, in the configuration that tuning chose."
CLOSE = 5  # points of percent: a saving this near to the dead share follows from it
LIVE_CHANGES = [f"{LIVE}, {grid}" for grid in variants.GRIDS]
LOOKED_AT = (*(name for pair in variants.OWN_PAIRS for name in pair), variants.OURS_TILES)


# ExecuTorch's own products


def own_products(rows: pd.DataFrame) -> str:
    """What each thing that a launch decides is worth to ExecuTorch's own products."""
    table = tables.own_products(rows)
    if table.empty:
        return _not_timed(rows)
    parts = [f"{change}: {_of_own(part)}" for change, part in table.groupby("change", sort=False)]
    return f"time before / after, in ExecuTorch's own products. {'; '.join(parts)}."


def _not_timed(rows: pd.DataFrame) -> str:
    """That ExecuTorch's own products were not, and why: nothing else says anything of the source's kernels."""
    return f"ExecuTorch's own products alone: {why_not(rows[rows['op'] != 'layer'], variants.RELEASED_GEMMS)}."


def _change(rows: pd.DataFrame, *changes: str) -> pd.DataFrame:
    """ExecuTorch's own products with and without some changes, a line a case, in words as a figure has them."""
    table = where(tables.own_products(rows), change=changes)
    return table.assign(row=labels(table, "T"), group=labels(table, "activations", "GEMM")) if len(table) else table


def _of_own(table: pd.DataFrame) -> str:
    """Ratios of some changes of them."""
    parts = [f"{kind} ×{span(part['ratio'])}" for kind, part in table.groupby("activations", sort=False)]
    return f"{' and '.join(parts)}, {counted(table['verdict'])} of {len(table)} cases"


def _also(rows: pd.DataFrame, *changes: str) -> list[str]:
    """The same question, answered by ExecuTorch's own products, where they were timed alone."""
    table = tables.own_products(rows)
    table = table[table["change"].isin(changes)]
    return [f"ExecuTorch's own products, blocks of {BLOCK_M} rows: {_of_own(table)}"] if len(table) else []


def _filling_judged(table: pd.DataFrame) -> str:
    """Whether filling the SMs pays: by the cases of which more than one program fits an SM."""
    more = table[table["CTAs an SM"] > 1]
    if more.empty:
        return "not judged, no two programs of ExecuTorch's own products fit an SM"
    said = f"where more than one program fits ({span(more['ratio'], '×{:.2f}')}, {len(more)} of {len(table)} cases)"
    pays = (more["verdict"] == "faster").mean() > 0.5
    return f"confirmed, filling the SMs pays {said}" if pays else f"refuted, filling the SMs gains little {said}"


# The grid


def grid(rows: pd.DataFrame) -> Drawing:
    """One CTA a tile / persistent against waves: the first cause."""
    table = tables.persistence(rows)
    table = table[table["waves"].notna()]
    if table.empty:
        return "no kernel was measured in both grids, with its tiles known."
    filled = table["persistent"] == variants.OURS_FILLED
    table = table.assign(
        pair=table["kernel"].mask(filled, table["kernel"] + f", {FILLED}"), at=table["waves"].map(rounded)
    )
    return drawing(
        plots.lines, table, "at", "ratio", "pair", panel="GEMM", logx=True, joined=False, reference=[(1, "same")],
        xlabel="waves of one CTA a tile", ylabel="one CTA a tile / persistent", title="When a persistent grid pays",
        alt="Marks of the ratio of both grids' times against waves, by kernel.",
        caption="Above 1 the persistent grid is faster. Waves: tiles over the CTAs that the GPU holds.",
        said=". ".join([*_also(rows, "persistent"), _by_waves(table)]), hidden=[*HIDDEN, "pair", "at"],
    )  # fmt: skip


def _by_waves(table: pd.DataFrame) -> str:
    """Mean ratios by waves, of as many programs as fit: the second cause is then left out; and what follows."""
    full = where(table, persistent=variants.OURS_FILLED)
    if full.empty:
        return f"Ours was not measured with {FILLED}"
    few, many = full["waves"].between(ONE_WAVE, FEW_WAVES, "right"), full["waves"] >= MANY_WAVES
    some = {
        f"up to {ONE_WAVE} wave": full["waves"] <= ONE_WAVE, f"{ONE_WAVE} to {FEW_WAVES} waves": few,
        f"{MANY_WAVES} waves and more": many,
        f"at most {100 * FULL:.0f} % of the slots' time is work": full["efficiency"] <= FULL,
    }  # fmt: skip
    parts = [f"{words} {_brief(full[these])}" for words, these in some.items() if these.any()]
    said = [f"Ours with {FILLED}: {'; '.join(parts)}", _costs_ctas(table)]
    if few.any() and many.any():
        gains = [geometric_mean(full[these]["ratio"]) for these in (few, many)]
        pays = gains[0] > max(1, gains[1]) + BAND
        said.append(f"First cause: {'confirmed, few waves gain' if pays else 'refuted, few waves gain nothing either'}")
    return ". ".join(one for one in said if one)


def _brief(table: pd.DataFrame) -> str:
    return f"×{geometric_mean(table['ratio']):.3f} ({counted(table['verdict'])} of {len(table)})"


def _costs_ctas(table: pd.DataFrame) -> str:
    """In how many pairs the loop over tiles leaves room for fewer CTAs."""
    pairs = table.drop_duplicates([*tables.CASE, "GEMM", "kernel"]).dropna(subset=tables.CODE)
    if pairs.empty:
        return ""
    fewer = (pairs["persistent CTAs"] < pairs["CTAs an SM"]).rename("fewer CTAs")
    ledger.note("pairs", fewer)
    said = "The loop over tiles takes registers: fewer CTAs of the persistent kernel fit in"
    return f"{said} {fewer.sum()} of {len(pairs)} pairs"


def bits(rows: pd.DataFrame) -> str:
    """Does the grid change a result?"""
    table = tables.same_bits(rows)
    if table.empty:
        return "the bits of the results are not recorded."
    same = int(table["same"].sum())
    if same == len(table):
        return f"in all {same} pairs of one CTA a tile and a persistent grid, the rows looked at have the same bits."
    odd = table[~table["same"]].iloc[0]
    return (
        f"in {len(table) - same} of {len(table)} pairs the bits differ, first in {odd['model']}, "
        f"{in_tokens(odd['T'])}, {odd['GEMM']}, {odd['kernel']}."
    )


def why(rows: pd.DataFrame) -> str:
    """The source's own case in words: both products in both grids, their code, occupancy, what is dead."""
    table = tables.source_point(rows).set_index("variant")
    said = [_of_point(rows, table, int8) for int8 in (False, True)]
    if not any(said):
        return f"{_not_timed(rows)} So nothing is said of the source's own point. {ours_there(rows)}".rstrip()
    return sentences([*said, ours_there(rows)], "")


def _of_point(rows: pd.DataFrame, table: pd.DataFrame, int8: bool) -> str:
    """Of one kind of activations; empty where it was not timed in both grids. table: `tables.source_point`."""
    tiles, persistent = released(TILES, int8), released(PERSISTENT, int8)
    if not {tiles, persistent} <= set(table.index):
        return ""
    said = f"{persistent.partition(',')[0]}, both products: one CTA a tile / persistent is "
    said += f"×{table['tiles / this'][persistent]:.3f}{_each_gemm(rows, persistent)}."
    parts = [_other_code(table.loc[tiles], table.loc[persistent]), _filled(table, int8), _dead_there(table, int8)]
    return sentences([said, *parts], "")


def _each_gemm(rows: pd.DataFrame, persistent: str) -> str:
    """The same ratio of each product at the source's own point, with its interval."""
    table = where(tables.persistence(rows), model=QWEN35_35B.name, T=SOURCE_T, weights="INT4", persistent=persistent)
    parts = [f"{interval(line, 3)} of {line['GEMM']}" for _, line in table.iterrows()]
    noise = table["noise"].max()
    return f" ({', '.join(parts)}" + (f"; A/A within ±{100 * noise:.1f} %)" if noise == noise else ")")


def _other_code(tiles: pd.Series, persistent: pd.Series) -> str:
    """What the loop over tiles, and what each grid has tuned, make of each product's kernel."""
    columns = {"GEMM1": ("registers", "CTAs an SM"), "GEMM2": ("GEMM2 registers", "GEMM2 CTAs")}
    parts = [
        f"{gemm} {tiles[registers]:.0f} → {persistent[registers]:.0f} registers, {tiles[ctas]:.0f} → "
        f"{persistent[ctas]:.0f} CTAs"
        for gemm, (registers, ctas) in columns.items()
        if persistent[registers] == persistent[registers] and tiles[registers] == tiles[registers]
    ]
    return f"Each grid has other code: {'; '.join(parts)} that fit an SM." if parts else ""


def _filled(table: pd.DataFrame, int8: bool) -> str:
    """As many programs as fit, instead of one, and against one CTA a tile."""
    filled = released(f"{PERSISTENT}, {FILLED}", int8)
    if filled not in table.index:
        return ""
    gain = table[BOTH][released(PERSISTENT, int8)] / table[BOTH][filled]
    over_tiles = table["tiles / this"][filled]
    return f"As many programs as fit are ×{gain:.3f} over one, and ×{over_tiles:.3f} over one CTA a tile."


def _dead_there(table: pd.DataFrame, int8: bool) -> str:
    tiles, live = released(TILES, int8), released(f"{TILES}, {LIVE}", int8)
    if live not in table.index or table["dead %"][tiles] != table["dead %"][tiles]:
        return ""
    gain = table[BOTH][tiles] / table[BOTH][live]
    return f"{table['dead %'][tiles]:.1f} % of the blocks are dead, and leaving them off gives ×{gain:.3f}."


def occupancy(rows: pd.DataFrame) -> Drawing:
    """The second cause: SMs × occupancy over one program an SM."""
    table = _change(rows, FILLED)
    if table.empty:
        return f"{_not_timed(rows)} So the second cause is not judged on this GPU."
    said = f"×{span(table['ratio'])}, {counted(table['verdict'])} of {len(table)} cases. Second cause: "
    return drawing(
        plots.ratios, table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time one program an SM / time as many as fit (above 1: filling pays)", title="What occupancy is worth",
        alt="Ratios of time with one program an SM over time with as many as fit, by case.",
        caption=OWN_PRODUCTS, said=said + _filling_judged(table), hidden=[*HIDDEN, "row", "group", "change"],
        units=UNITS,
    )  # fmt: skip


def order(rows: pd.DataFrame) -> Drawing:
    """The third cause: tile order, of experts whose weights the L2 holds."""
    table = _change(rows, GROUPED)
    if table.empty:
        return f"{_not_timed(rows)} So the third cause is not judged on this GPU."
    return drawing(
        plots.ratios, table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time groups of one block / time with groups (above 1: grouping pays)", title="What tile order is worth",
        alt="Ratios of time with groups of one block over time with the groups that tuning chose, by case.",
        caption=OWN_PRODUCTS, said=_of_order(table), hidden=[*HIDDEN, "row", "group", "change"], units=UNITS,
    )  # fmt: skip


def _of_order(table: pd.DataFrame) -> str:
    """What grouping gives where only the order differs, where the code does too, and what follows."""
    same = table["same code"].astype(bool)
    said = [f"In the same code: {_of_own(table[same])}"] if same.any() else []
    if not same.all():
        said.append(f"Other code, so that the ratio is not the order's: {_of_own(table[~same])}")
    if not same.any():
        return ". ".join([*said, "Third cause: not judged, the order cannot be told from the code"])
    most = table[same]["ratio"].max()
    pays = (table[same]["verdict"] == "faster").mean() > 0.5
    word = "refuted, the order pays" if pays else "confirmed, the order gains little"
    size = f"experts of {_expert_mb():.1f} MB"
    return ". ".join([*said, f"Third cause: {word} with {size} (at most ×{most:.2f})"])


def _expert_mb() -> float:
    """MB of an expert's INT4 weights in the source's model, scales included."""
    case = Case("layer", QWEN35_35B.as_dict() | {"T": SOURCE_T, "routing": UNIFORM, "weights": "INT4"})
    return work.weight_bytes(case) / work.active(case) / 1e6


def pays(rows: pd.DataFrame) -> str:
    """Which changes are faster in every case, which slower, and which depend on the case."""
    table = tables.worth(rows)
    if table.empty:
        return _not_timed(rows)
    both = table.groupby("change", sort=False)[["faster", "slower", "cases"]].sum()
    faster, slower = (set(both.index[both[word] == both["cases"]]) for word in ("faster", "slower"))
    groups = {"Faster in every case": faster, "Slower in every case": slower}
    groups["It depends, or is the same"] = set(both.index) - faster - slower
    parts = {words: _changes(where(table, change=some)) for words, some in groups.items() if some}
    return " ".join(f"{words}: {'; '.join(part)}." for words, part in parts.items())


def _changes(table: pd.DataFrame) -> list[str]:
    """Changes in words, each with its ratios for each kind of activations."""
    found = []
    for change, part in table.groupby("change", sort=False):
        ratios = [
            f"{line['activations']} ×{span(line[['least', 'most']])}, faster in {line['faster']} of {line['cases']}"
            for _, line in part.iterrows()
        ]
        found.append(f"{change} ({'; '.join(ratios)})")
    return found


def dead(rows: pd.DataFrame) -> Drawing:
    """What leaving off the blocks without a token saves, against what is dead of the grid."""
    table = _change(rows, *LIVE_CHANGES)
    table = table[table["dead %"].notna()] if len(table) else table
    if table.empty:
        return f"{_not_timed(rows)} So nothing is said of what dead blocks cost."
    table = table.assign(**{"saved %": 100 * (1 - 1 / table["ratio"]), "dead %": table["dead %"].round(1)})
    off = table["saved %"] - table["dead %"]
    near = off.abs() <= CLOSE
    said = f"{span(table['dead %'], '{:.0f}')} % dead, {span(table['saved %'], '{:.0f}')} % of the time saved: "
    said += f"within {CLOSE} points of what is dead in {near.sum()} of {len(table)} cases, less in "
    said += f"{(~near & (off < 0)).sum()}, more in {(~near & (off > 0)).sum()}; without dead blocks it is "
    return drawing(
        plots.lines, table, "dead %", "saved %", "change", panel="activations", joined=False,
        reference=[(0, "nothing")], xlabel="dead blocks, %", ylabel="time saved, %", title="What dead blocks cost",
        alt="Marks of the time that live blocks alone save against the dead share of the grid.",
        caption=f"{OWN_PRODUCTS} The grid is for the worst case; here as if the host knew how many blocks are live.",
        said=said + counted(table["verdict"]), hidden=[*HIDDEN, "row", "group"],
    )  # fmt: skip


def dead_shares(tokens: Sequence[int], blocks: Sequence[int] = (16, 64)) -> pd.DataFrame:
    """Dead share of the source's grid under uniform routing by arithmetic, for every model; no measurement."""
    found = []
    for model in MODELS.values():
        for t in tokens:
            line = {"model": model.name, "T": t}
            for size in blocks:
                live = waves.expected_blocks(t, model.top_k, model.experts, size)
                share = waves.dead_share(live, experts_blocks.source_blocks(t, model.top_k, model.experts, size))
                line[f"dead %, BM={size}"] = 100 * share
            found.append(line)
    return pd.DataFrame(found)


def compiled_wanted(study: Study, parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """The lab's kernel of which the page shows what is made of it here: GEMM1 at the source's own point."""
    shape = QWEN35_35B.as_dict() | {"T": SOURCE_T, "routing": UNIFORM, "weights": "INT4", "activations": "bf16"}
    case = Case("gemm1", shape)
    known = {x.key for x in study.cases(parameters) if x.op == case.op}
    return [(case, variants.OURS_TILES)] if case.key in known else []


def as_timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The code of ExecuTorch's own products and of ours as they were timed; it depends on the version of Triton."""
    found = tables.code(rows, LOOKED_AT)
    if found.empty:
        return found
    table = compiled_table(found).assign(Triton=found["triton"]).drop(columns=["target"])
    table.insert(1, "GEMM", found["GEMM"])
    return table


def compiled_table(evidence: pd.DataFrame) -> pd.DataFrame:
    """Registers, occupancy, matrix instructions and loads of each kernel by target."""
    if evidence.empty:
        return evidence
    here = "arch" in evidence  # if not: of recorded rows, where Triton is missing
    found = evidence[["variant", "registers", "spill_bytes", "ctas_per_sm"]].rename(
        columns={"spill_bytes": "bytes spilled", "ctas_per_sm": "CTAs an SM"}
    )
    found.insert(1, "target", [f"sm_{arch}" for arch in evidence["arch"]] if here else "as recorded")
    found.insert(2, "Triton", version("triton") if here else "as recorded")
    for column, name in (("matrix", "matrix instructions"), ("loads", "loads, by bits")):
        found[name] = [_counts(some) for some in evidence[column]]
    return found


def _counts(some: Any) -> str:
    """Kinds of instructions, with how many of each the code has where that is known."""
    return ", ".join(f"{kind} (×{some[kind]})" if isinstance(some, Mapping) else str(kind) for kind in some)


def waves_by_gpu(model: MoeModel, tokens: int, block_m: int, block_n: int, per_sm: int) -> pd.DataFrame:
    """Waves and efficiency of both GEMMs of a shape on GPUs of several sizes, uniform routing; no measurement."""
    live = round(waves.expected_blocks(tokens, model.top_k, model.experts, block_m))
    found = []
    for name, columns in (("gemm1", 2 * model.width), ("gemm2", model.hidden)):
        tiles = experts_blocks.tiles(live, columns, block_n)
        for gpu, (count, share) in waves.on_gpus(tiles, per_sm).items():
            found.append({"GEMM": name, "GPU": gpu, "tiles": tiles, "waves": count, "efficiency": share})
    return pd.DataFrame(found)


# Other sizes of GPUs


def steps(rows: pd.DataFrame) -> Drawing:
    """Time against tiles on parts of the GPU: whole waves are what counts."""
    table = tables.steps(rows)
    if table.empty:
        return "the GEMM of few tiles was not measured on parts of this GPU."
    table = table.assign(part=table["SMs"].astype(str) + " SMs").sort_values(["SMs", "tiles"])
    known = table[table["predicted"].notna()]
    off = (100 * (known["measured"] / known["predicted"] - 1)).rename("off, %")
    ledger.note("steps", known.assign(**{off.name: off}))
    said = "No part of the GPU was measured beside all of it"
    if len(off):
        said = f"Measured over predicted by whole waves: {off.median():+.0f} % in the median of {len(off)}, "
        said += f"{off.min():+.0f} to {off.max():+.0f} %"
    return drawing(
        plots.lines, table, "tiles", "us", "part", panel="grid", xlabel="tiles", ylabel="µs",
        title="A GEMM of few tiles on fewer multiprocessors",
        alt="Lines of time against tiles, by multiprocessors and grid.",
        caption="All tokens at one expert; timed outside the blocks of the other variants.", said=said,
        hidden=["part"], units=UNITS,
    )  # fmt: skip


def other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency of the source's grid on GPUs of other sizes, one column a GPU; by arithmetic."""
    table = tables.on_other_gpus(rows)
    if table.empty:
        return table
    found = table.pivot_table(index=["kernel", "GEMM", "T"], columns="GPU", values="efficiency", sort=False)
    return found[[gpu for gpu in waves.SMS if gpu in found]].reset_index()


def fuller(rows: pd.DataFrame) -> str:
    """Whether fewer multiprocessors mean emptier waves, by the same arithmetic."""
    table = tables.on_other_gpus(rows)
    if table.empty:
        return _not_timed(rows)
    means = table.groupby("GPU")["efficiency"].mean()[sorted(waves.SMS, key=waves.SMS.__getitem__)]
    parts = [f"{gpu} ({waves.SMS[gpu]} SMs) {share:.3f}" for gpu, share in means.items()]
    emptier = means.is_monotonic_increasing and means.iloc[0] < means.iloc[-1] - BAND
    follows = "the fewer, the emptier" if emptier else "how full they are does not follow from how many there are"
    return f"the mean of each column is {', '.join(parts)}: {follows}."


ledger.watch(__name__)
