"""Figures and sentences of one GEMM in both grids, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from labkit.bench.spec import Case, Study
from labkit.bench.tables import where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.kernels.experts import blocks as experts_blocks
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import interval, mean, rounded, sentences, span
from labkit.report.words import tokens as in_tokens
from labkit.studies.moe_persistent_grid import tables, variants, waves
from labkit.studies.moe_persistent_grid.models import MODELS, QWEN35_35B, MoeModel
from labkit.studies.moe_persistent_grid.variants import BASE, FILLED, FILLED_BASE, LIVE, SOURCE_T, UNIFORM
from labkit.studies.moe_persistent_grid.views import HIDDEN, UNITS, labels, ours_there

ONE_WAVE, FEW_WAVES, MANY_WAVES = 1, 3, 10
FULL = 0.9  # share of the slots' time that is work, up to which a last wave leaves something to win
BAND = 0.01  # a mean ratio nearer to 1 is none
BOTH = "µs, both"  # of the source's own point
GROUPED = "groups of more than 1"  # a change of `tables.own_products`
BLOCK_M = 64  # rows of a block of ExecuTorch's own batched kernels
CLOSE = 5  # points of percent: a saving this near to the dead share follows from it
TILES, WIDE_TILES = variants.source(16, variants.TILES), variants.source(64, variants.TILES)
ONCE, EARLY = (variants.source(16, variants.PERSISTENT, word) for word in (variants.ONCE, variants.EARLY))
LOOKED_AT = (TILES, BASE, ONCE, WIDE_TILES, variants.source(16, variants.TILES, int8=True), variants.OURS_TILES)


# ExecuTorch's own products


def own_products(rows: pd.DataFrame) -> str:
    """What each thing that a launch decides is worth to ExecuTorch's own products."""
    table = tables.own_products(rows)
    if table.empty:
        return f"ExecuTorch's own products alone: {why_not(rows[rows['op'] != 'layer'], variants.RELEASED_GEMMS)}."
    parts = [f"{change}: {_of_own(part)}" for change, part in table.groupby("change", sort=False)]
    return f"time before / after, in ExecuTorch's own products. {'; '.join(parts)}."


def _of_own(table: pd.DataFrame) -> str:
    """Ratios of some changes of them."""
    parts = [f"{kind} ×{span(part['ratio'])}" for kind, part in table.groupby("activations", sort=False)]
    return f"{' and '.join(parts)}, {counted(table['verdict'])} of {len(table)} cases"


def _also(rows: pd.DataFrame, *changes: str) -> list[str]:
    """The same question, answered by ExecuTorch's own products, where they were timed alone."""
    table = tables.own_products(rows)
    table = table[table["change"].isin(changes)]
    return [f"ExecuTorch's own products, blocks of {BLOCK_M} rows: {_of_own(table)}"] if len(table) else []


def _order_of_own(rows: pd.DataFrame) -> list[str]:
    """What grouping gives ExecuTorch's own products, where only the order differs."""
    table = where(tables.own_products(rows), change=GROUPED)
    fair = table["same code"].astype(bool)
    if table.empty or fair.all():
        return _also(rows, GROUPED)
    said = f"ExecuTorch's own products, blocks of {BLOCK_M} rows: "
    said += f"{_of_own(table[fair])} in which the code has as many registers; " if fair.any() else ""
    return [f"{said}other code, so that the ratio is not the order's: {_of_own(table[~fair])}"]


def _own_pays(rows: pd.DataFrame, change: str) -> bool | None:
    """Whether it does in most cases of ExecuTorch's own products; None if they were not timed alone."""
    table = where(tables.own_products(rows), change=change)
    return bool((table["verdict"] == "faster").mean() > 0.5) if len(table) else None


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
    fewer = int((pairs["persistent CTAs"] < pairs["CTAs an SM"]).sum())
    said = "The loop over tiles takes registers: fewer CTAs of the persistent kernel fit in"
    return f"{said} {fewer} of {len(pairs)} pairs"


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
    """The source's own case in words: both GEMMs, their code, occupancy, loads, what is dead."""
    table = tables.source_point(rows).set_index("variant")
    if not {TILES, BASE} <= set(table.index):
        return f"the case of {QWEN35_35B.name} at {SOURCE_T} tokens was not measured."
    own = _also(rows[rows["case"].str.contains(f'"T": {SOURCE_T},')], "persistent")
    said = f"{own[0]}. In our version of them, with" if own else "with"
    said += f" blocks of 16 rows and W4A16, one CTA a tile / persistent is ×{table['tiles / this'][BASE]:.3f}"
    parts = [_other_code(table), _fitting(table), _loads(table), _dead(table), ours_there(rows)]
    return f"{said}{_each_gemm(rows)}. " + sentences(parts, "")


def _each_gemm(rows: pd.DataFrame) -> str:
    """The same ratio of each GEMM, with its interval."""
    table = where(tables.persistence(rows), model=QWEN35_35B.name, T=SOURCE_T, weights="INT4", persistent=BASE)
    parts = [f"{interval(line, 3)} of {line['GEMM']}" for _, line in table.iterrows()]
    noise = table["noise"].max()
    return f" ({', '.join(parts)}" + (f"; A/A within ±{100 * noise:.1f} %)" if noise == noise else ")")


def _other_code(table: pd.DataFrame) -> str:
    """What the loop over tiles makes of each GEMM's kernel."""
    tiles, base = table.loc[TILES], table.loc[BASE]
    columns = {"GEMM1": ("registers", "CTAs an SM"), "GEMM2": ("GEMM2 registers", "GEMM2 CTAs")}
    parts = [
        f"{gemm} {tiles[registers]:.0f} → {base[registers]:.0f} registers, {tiles[ctas]:.0f} → {base[ctas]:.0f} CTAs"
        for gemm, (registers, ctas) in columns.items()
        if base[registers] == base[registers] and tiles[registers] == tiles[registers]
    ]
    return f"The loop over tiles makes other code: {'; '.join(parts)} that fit an SM." if parts else ""


def _fitting(table: pd.DataFrame) -> str:
    base, said = table.loc[BASE], []
    if base["CTAs an SM"] == base["CTAs an SM"]:
        said.append(f"Of GEMM1 {base['CTAs an SM']:.0f} CTAs fit an SM and {base['launched an SM']:.0f} is launched.")
    if FILLED_BASE in table.index:
        tiles, filled = table.loc[TILES], table.loc[FILLED_BASE]
        each = [f"{gemm} ×{tiles[f'{gemm} µs'] / filled[f'{gemm} µs']:.3f}" for gemm in ("GEMM1", "GEMM2")]
        said.append(
            f"As many as fit are ×{base[BOTH] / filled[BOTH]:.3f} over one, and ×{filled['tiles / this']:.3f} over one "
            f"CTA a tile ({', '.join(each)})."
        )
    return " ".join(said)


def _loads(table: pd.DataFrame) -> str:
    """What loads of single bytes cost."""
    if ONCE not in table.index:
        return ""
    said = f"Each byte of a weight loaded once, not twice, gives ×{table[BOTH][BASE] / table[BOTH][ONCE]:.3f}"
    loads = table["8-bit loads"][[BASE, ONCE]]
    if loads.notna().all():
        said += f": the code has {loads[BASE]:.0f} loads of 8 bits before and {loads[ONCE]:.0f} after"
    return f"{said}."


def _dead(table: pd.DataFrame) -> str:
    if EARLY not in table.index or table["dead %"][BASE] != table["dead %"][BASE]:
        return ""
    gain = table[BOTH][BASE] / table[BOTH][EARLY]
    return f"{table['dead %'][BASE]:.1f} % of the blocks are dead, and leaving them off gives ×{gain:.3f}."


def occupancy(rows: pd.DataFrame) -> Drawing:
    """The second cause: SMs × occupancy over one program an SM, by the CTAs that fit."""
    table = tables.filling(rows)
    if table.empty:
        return f"{FILLED} was not measured."
    table = table.assign(row=labels(table, "T"), group=labels(table, "model", "weights", "GEMM"))
    return drawing(
        plots.ratios, table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time one program an SM / time as many as fit (above 1: filling pays)", title="What occupancy is worth",
        alt="Ratios of time with one program an SM over time with as many as fit, by case.",
        caption="Our version of the source's persistent kernel, blocks of 16 rows.", said=_of_filling(table, rows),
        hidden=[*HIDDEN, "row", "group"], units=UNITS,
    )  # fmt: skip


def _of_filling(table: pd.DataFrame, rows: pd.DataFrame) -> str:
    """How much, of how many programs, what it leaves of the loss against one CTA a tile, and what follows."""
    said = [f"×{span(table['ratio'])}, {counted(table['verdict'])} of {len(table)} cases"]
    parts = [
        f"{weights} {span(part['gain / programs'])} with {span(part['programs'], '{:.0f}')} programs an SM"
        for weights, part in table.dropna(subset=["programs"]).groupby("weights")
    ]
    said += [f"Gain over their number: {'; '.join(parts)}"] if parts else []
    left = table.dropna(subset=["tiles / filled"]).groupby("GEMM")["tiles / filled"]
    left = [f"{gemm} {mean(part)}" for gemm, part in left]
    said += [f"One CTA a tile / as many as fit: {'; '.join(left)}"] if left else []
    own = _own_pays(rows, FILLED)
    pays = (table["verdict"] == "faster").mean() > 0.5 if own is None else own
    said += _also(rows, FILLED)
    judged = "confirmed, filling the SMs pays" if pays else "refuted, filling the SMs gains little"
    return ". ".join([*said, f"Second cause: {judged}"])


def order(rows: pd.DataFrame) -> Drawing:
    """The third cause: tile order, on fine-grained experts and on Mixtral's."""
    table = tables.order(rows)
    if table.empty:
        return "no tile orders were measured."
    table = table.assign(line=labels(table, "model", "weights", "T"))
    fair = table.groupby([*tables.CASE, "GEMM"])["as groups of 1"].transform("all")
    if not fair.any():
        why = "the compiler makes other code of groups of 1 in every case, so that the order cannot be told from it."
        return ". ".join([*_order_of_own(rows), why])
    return drawing(
        plots.lines, table[fair], "groups of", "ratio", "line", panel="GEMM", logx=True,
        reference=[(1, "groups of 1")], xlabel="GROUP_SIZE_M", ylabel="time groups of 1 / time",
        title="Tile order, the same code",
        alt="Lines of time with groups of 1 over time with larger groups, by model and tokens.",
        caption="Above 1: grouping pays. Our version of the source's kernel, blocks of 16 rows.",
        said=". ".join([*_order_of_own(rows), _of_order(table[fair], table[~fair])]), table=table,
        hidden=[*HIDDEN, "line"], units=UNITS,
    )  # fmt: skip


def _of_order(fair: pd.DataFrame, other: pd.DataFrame) -> str:
    """What grouping gives where only the order differs, where the code does too, what was counted, what follows."""
    large = fair[fair["groups of"] > 1]
    if large.empty:
        return "Only one order was measured"
    parts = [
        f"{model}, {gemm} ({span(part['MB an expert'], '{:.1f}')} MB an expert) ×{span(part['ratio'])}"
        for (model, gemm), part in large.groupby(["model", "GEMM"], sort=False)
    ]
    said = ["; ".join(parts)]
    other, hits = other[other["groups of"] > 1], fair[fair["L2 hits %"].notna()]
    if len(other):
        said.append(
            f"Left out: {len(other.groupby([*tables.CASE, 'GEMM']))} cases (×{span(other['ratio'])}) in which the "
            "compiler makes other code of groups of 1, with other registers, so that the ratio is not the order's"
        )
    said += [f"Sectors that the L2 had: {span(hits['L2 hits %'], '{:.0f}')} %"] if len(hits) else []
    means = large.groupby("model").agg(size=("MB an expert", "max"), gain=("ratio", "max")).sort_values("size")
    if len(means) > 1:
        small, big = means["gain"].iloc[0], means["gain"].iloc[-1]
        pays = big > max(1, small) + 2 * BAND
        said.append(
            f"Third cause: {'confirmed' if pays else 'refuted'}, grouping gives at most ×{big:.2f} in the model whose "
            f"experts are largest and ×{small:.2f} where they are smallest"
        )
    return ". ".join(said)


def pays(rows: pd.DataFrame) -> str:
    """Which changes are faster in every case, which slower, and which depend on the case; tile order apart."""
    table = tables.worth(rows)
    table = table[table["over"] != variants.grouped(1)]
    if table.empty:
        return "no change was measured."
    faster, slower = (table[word] == table["cases"] for word in ("faster", "slower"))
    groups = {"Faster in every case": faster, "Slower in every case": slower}
    groups["It depends, or is the same"] = ~faster & ~slower
    return " ".join(f"{words}: {'; '.join(_changes(table[some]))}." for words, some in groups.items() if some.any())


def _changes(table: pd.DataFrame) -> list[str]:
    """Changes in words, each with its ratios for each kind of weights."""
    found = []
    for (after, before), part in table.groupby(["change", "over"], sort=False):
        ratios = [
            f"{line['weights']} ×{span(line[['least', 'most']])}, faster in {line['faster']} of {line['cases']}"
            for _, line in part.iterrows()
        ]
        found.append(f"{_change(after, before)} ({'; '.join(ratios)})")
    return found


def _change(after: str, before: str) -> str:
    """A change in words, and what it is a change of."""
    added, before = after.removeprefix(f"{before}, "), before.removeprefix("source ")
    return f"{after.removeprefix('source ')} instead of {before}" if added == after else f"{added} of {before}"


def dead(rows: pd.DataFrame) -> Drawing:
    """What early exit saves, against what is dead of the grid."""
    table = tables.dead(rows)
    table = table[table["dead %"].notna()]
    if table.empty:
        return "early exit was not measured, or not with the grid's blocks."
    table = table.assign(**{"saved %": 100 * (1 - 1 / table["ratio"]), "dead %": table["dead %"].round(1)})
    off = table["saved %"] - table["dead %"]
    near = off.abs() <= CLOSE
    said = f"{span(table['dead %'], '{:.0f}')} % dead, {span(table['saved %'], '{:.0f}')} % of the time saved: "
    said += f"within {CLOSE} points of what is dead in {near.sum()} of {len(table)} cases, less in "
    said += f"{(~near & (off < 0)).sum()}, more in {(~near & (off > 0)).sum()}; early exit is "
    return drawing(
        plots.lines, table, "dead %", "saved %", "grid", panel="weights", joined=False, reference=[(0, "nothing")],
        xlabel="dead blocks, %", ylabel="time saved by early exit, %", title="What dead blocks cost",
        alt="Marks of the time saved by early exit against the dead share of the grid.",
        caption="Our version of the source's kernel, blocks of 16 rows; the grid is for the worst case.",
        said=". ".join([*_dead_of_own(rows), said + counted(table["verdict"])]), hidden=HIDDEN,
    )  # fmt: skip


def _dead_of_own(rows: pd.DataFrame) -> list[str]:
    """How much of ExecuTorch's own grids is dead, and what leaving that off saves."""
    changes = [f"{LIVE}, {grid}" for grid in variants.GRIDS]
    table = tables.own_products(rows)
    table = table[table["change"].isin(changes)]
    if table.empty:
        return []
    saved = 100 * (1 - 1 / table["ratio"])
    said = f"{span(table['dead %'], '{:.0f}')} % of the blocks dead, {span(saved, '{:.0f}')} % of the time saved"
    return [*_also(rows, *changes), said]


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
    """The kernels whose code the page shows: the source's GEMM1 at its own tokens, and the lab's."""
    shape = QWEN35_35B.as_dict() | {"T": SOURCE_T, "routing": UNIFORM, "weights": "INT4", "activations": "bf16"}
    case = Case("gemm1", shape)
    known = {x.key for x in study.cases(parameters) if x.op == case.op}
    return [(case, name) for name in LOOKED_AT] if case.key in known else []


def as_timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The code of the same kernels as they were timed, of both GEMMs; it depends on the version of Triton."""
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
    off = 100 * (known["measured"] / known["predicted"] - 1)
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
    found = table.pivot_table(index=["model", "GEMM", "T"], columns="GPU", values="efficiency", sort=False)
    return found[[gpu for gpu in waves.SMS if gpu in found]].reset_index()


def fuller(rows: pd.DataFrame) -> str:
    """Whether fewer multiprocessors mean emptier waves, by the same arithmetic."""
    table = tables.on_other_gpus(rows)
    if table.empty:
        return "there is no such measurement."
    means = table.groupby("GPU")["efficiency"].mean()[sorted(waves.SMS, key=waves.SMS.__getitem__)]
    parts = [f"{gpu} ({waves.SMS[gpu]} SMs) {share:.3f}" for gpu, share in means.items()]
    smallest, largest = means.iloc[0], means.iloc[-1]
    follows = "the fewer, the emptier" if smallest < largest - BAND else "fewer multiprocessors are no emptier"
    return f"the mean of each column is {', '.join(parts)}: {follows}."
