"""Figures and sentences of one GEMM in both grids, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.spec import Case, Study
from labkit.bench.tables import where, why_not
from labkit.bench.verdict import geometric_mean
from labkit.kernels.experts import blocks as experts_blocks
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster, gains, rounded, span
from labkit.report.words import tokens as in_tokens
from labkit.studies.moe_persistent_grid import tables, variants, waves, work
from labkit.studies.moe_persistent_grid.models import MODELS, QWEN35_35B, MoeModel
from labkit.studies.moe_persistent_grid.variants import FILLED, LIVE, PERSISTENT, SOURCE_T, UNIFORM, released
from labkit.studies.moe_persistent_grid.views import DISPLAY, first_upper, gain, labels, named

ONE_WAVE, FEW_WAVES, MANY_WAVES = 1, 3, 10
BAND = 0.01  # a mean ratio nearer to 1 is none
GROUPED = "groups of more than 1"  # a change of `tables.own_products`
BLOCK_M = 64  # rows of a block of ExecuTorch's own batched kernels
OWN_PRODUCTS = f"ExecuTorch's own products (1.5.1), blocks of {BLOCK_M} rows, in the configuration that tuning chose."
CLOSE = 5  # points of percent: a saving this near to the empty share follows from it
LIVE_CHANGES = [f"{LIVE}, {grid}" for grid in variants.GRIDS]
POINT_CHANGES = {  # of the first screen -> the heading of its rows
    "persistent": "Persistent grid instead of one CTA per tile",
    LIVE_CHANGES[0]: "Empty blocks skipped, one CTA per tile",
}
LOOKED_AT = (*(name for pair in variants.OWN_PAIRS for name in pair), variants.OURS_TILES)
WAVES, CTAS, ORDER, EMPTY = "Waves", "Occupancy", "Cache and order of tiles", "Empty blocks"
FULL = "Persistent grid with full SMs, against one CTA per tile"


# ExecuTorch's own products


def own_products(rows: pd.DataFrame) -> pd.DataFrame:
    """Each thing that a launch of ExecuTorch's own products decides, as the page shows it."""
    return named(tables.own_products(rows))


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """The same over all cases."""
    return named(tables.worth(rows)).rename(columns={"mean ratio": "mean, × faster"})


def source_point(rows: pd.DataFrame) -> pd.DataFrame:
    """The products at the source's own point, as the page shows them."""
    return named(tables.source_point(rows)).rename(columns={"tiles / this": "× faster than one CTA a tile"})


def _not_timed(rows: pd.DataFrame) -> str:
    """That ExecuTorch's own products were not, and why: nothing else says anything of the source's kernels."""
    return f"ExecuTorch's own products alone: {why_not(rows[rows['op'] != 'layer'], variants.RELEASED_GEMMS)}."


def _change(rows: pd.DataFrame, *changes: str) -> pd.DataFrame:
    """ExecuTorch's own products with and without some changes, a line a case, in words as a figure has them."""
    table = where(tables.own_products(rows), change=changes)
    return table.assign(row=labels(table, "T"), group=labels(table, "activations", "GEMM")) if len(table) else table


def point(rows: pd.DataFrame) -> Drawing:
    """What each change of a launch is worth at the source's own point, by product and activations."""
    table = where(tables.own_products(rows), T=SOURCE_T, change=list(POINT_CHANGES))
    if table.empty:
        return _not_timed(rows)
    order = table["change"].map(list(POINT_CHANGES).index)
    table = table.loc[order.sort_values(kind="stable").index]  # a heading's rows beneath it
    table = table.assign(group=table["change"].map(POINT_CHANGES), row=labels(table, "activations", "GEMM"))
    wins = (table["verdict"] == "faster").groupby(table["change"]).mean()
    clear = wins.get(LIVE_CHANGES[0], 0) == 1 and wins.get("persistent", 1) <= 0.5
    empty = where(table, change=LIVE_CHANGES[0])
    said = [_grid_worth(where(table, change="persistent"))]
    said += [f"Empty blocks skipped: {gains(empty['ratio'])}"] if len(empty) else []
    return drawing(
        plots.ratios, table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="× faster after the change (below 1: slower)",
        title="Single products: skipping empty blocks pays, a persistent grid seldom" if clear
        else "Single products: what each change of the launch is worth",
        alt="How many times faster products are after each change of the launch, by product and activations.",
        caption=f"ExecuTorch's own two products (GEMMs) of a layer, each alone, at {SOURCE_T} tokens: INT4 weights, "
        "activations in bf16 (W4A16) or INT8 (W4A8). 0.80 is 1.25× slower. Empty blocks are CTAs that find no rows of "
        "their expert; they are skipped as if the host knew how many there are. Bars: 95 % intervals.",
        said=". ".join(filter(None, said + _own_wins(rows))), table=named(table, "group", "row", "T"),
    )  # fmt: skip


def _grid_worth(table: pd.DataFrame) -> str:
    """ "Persistent grid: 1.08× faster in W4A16, GEMM2, 1.27× to 1.32× slower in the others"; of all, if none wins."""
    won = table["verdict"] == "faster"
    if table.empty or not won.any() or won.all():
        return f"Persistent grid: {gains(table['ratio'])}" if len(table) else ""
    winners = ", ".join(f"{faster(ratio)} in {row}" for row, ratio in table.loc[won, ["row", "ratio"]].to_numpy())
    return f"Persistent grid: {winners}, {gains(table.loc[~won, 'ratio'])} in the others"


def _own_wins(rows: pd.DataFrame) -> list[str]:
    """In how many cases of the claim about the lab's own products the persistent grid is the faster one."""
    table = where(tables.persistence(rows), kernel=variants.OURS, weights="bf16")
    if table.empty:
        return []
    wins = (table["verdict"] == "faster").rename("persistent is faster")
    ledger.note("wins", wins)
    return [f"Our own bf16 GEMMs: a persistent grid is faster in {wins.sum()} of {len(wins)} cases"]


def causes(rows: pd.DataFrame) -> dict[str, str]:
    """Possible cause -> whether it hides the gain of the persistent grid, and the numbers that say so."""
    return _waves_judged(rows) | _filling_judged(rows) | _order_judged(rows) | _empty_judged(rows) | _full_grid(rows)


def _full_grid(rows: pd.DataFrame) -> dict[str, str]:
    """What is left of the question when the second cause is out of the way, at the source's own point."""
    table, said = tables.source_point(rows).set_index("variant")["tiles / this"], []
    for int8, kind in ((False, "W4A16"), (True, "W4A8")):
        filled = released(f"{PERSISTENT}, {FILLED}", int8)
        if filled in table:
            said.append(f"{kind} {faster(table[filled])}")
    return {FULL: ", ".join(said)} if said else {}


def _filling_judged(rows: pd.DataFrame) -> dict[str, str]:
    """Whether filling the SMs pays: by the cases of which more than one CTA fits an SM."""
    table = _change(rows, FILLED)
    if table.empty:
        return {CTAS: _not_timed(rows)}
    more = table[table["CTAs an SM"] > 1]
    if more.empty:
        return {CTAS: "not judged: no two CTAs fit an SM"}
    pays = (more["verdict"] == "faster").mean() > 0.5
    return {CTAS: f"{'confirmed' if pays else 'refuted'}: with as many as fit {gains(more['ratio'])}"}


# The grid


def grid(rows: pd.DataFrame) -> Drawing:
    """How much faster the persistent grid is against waves: the first cause."""
    table = tables.persistence(rows)
    table = table[table["waves"].notna()]
    if table.empty:
        return "no kernel was measured in both grids, with its tiles known."
    kernels = {variants.OURS_PERSISTENT: "lab, one CTA an SM", variants.OURS_FILLED: "lab, as many CTAs as fit"}
    table = table.assign(
        pair=[kernels.get(line["persistent"], line["kernel"]) for _, line in table.iterrows()],
        at=table["waves"].map(rounded),
    )
    judged = _waves_judged(rows)
    refuted = judged.get(WAVES, "").startswith("refuted")
    return drawing(
        plots.lines, table, "at", "ratio", "pair", logx=True, joined=False, reference=[(1, "equal")],
        xlabel="waves of one CTA per tile", ylabel="× faster as a persistent grid",
        title="Few waves do not make a persistent grid pay" if refuted else "When a persistent grid pays",
        alt="Marks of how much faster the persistent grid is, against waves, by kernel.",
        caption="Every shape and number of tokens, both products. Waves: tiles over the CTAs that the GPU holds.",
        said=first_upper(judged.get(WAVES, "")), table=named(table, "pair", "at"),
    )  # fmt: skip


def _waves_judged(rows: pd.DataFrame) -> dict[str, str]:
    """Few waves against many, of the lab's products with as many CTAs as fit: the second cause is then left out."""
    table = where(tables.persistence(rows), persistent=variants.OURS_FILLED)
    return {WAVES: _by_waves(table)} if len(table) else {}


def _by_waves(table: pd.DataFrame) -> str:
    few, many = table["waves"].between(ONE_WAVE, FEW_WAVES, "right"), table["waves"] >= MANY_WAVES
    if not (few.any() and many.any()):
        return "not judged: few waves and many were not both timed"
    gained = [geometric_mean(table[these]["ratio"]) for these in (few, many)]
    word = "confirmed" if gained[0] > max(1, gained[1]) + BAND else "refuted"
    return (
        f"{word}: {faster(gained[0])} at {ONE_WAVE} to {FEW_WAVES} waves, {faster(gained[1])} at {MANY_WAVES} or more"
    )


def fewer_ctas(rows: pd.DataFrame) -> str:
    """In how many pairs the loop over tiles leaves room for fewer CTAs."""
    table = tables.persistence(rows)
    pairs = table.drop_duplicates([*tables.CASE, "GEMM", "kernel"]).dropna(subset=tables.CODE)
    if pairs.empty:
        return "the code of no pair of grids is recorded."
    fewer = (pairs["persistent CTAs"] < pairs["CTAs an SM"]).rename("fewer CTAs")
    ledger.note("pairs", fewer)
    return f"fewer CTAs of the persistent kernel fit an SM in {fewer.sum()} of {len(pairs)} pairs."


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


def why(rows: pd.DataFrame) -> dict[str, str]:
    """The source's own point: question -> what the persistent grid, and what else a launch decides, gains there."""
    table, found = tables.point_ratios(rows), {}
    lab = where(table, change=tables.LAB_THERE)
    for kind, part in table.drop(lab.index).groupby("activations", sort=False):
        for _, line in _persistent_there(rows, kind).iterrows():
            found[f"{kind}, {line['GEMM'].upper()}: persistent grid"] = gain(line)
        for _, line in part.iterrows():
            found[f"{kind}, both products: {line['change']}"] = faster(line["ratio"])
    found = found or {"ExecuTorch's products": _not_timed(rows)}
    return found | {
        line["change"]: f"{faster(line['ratio'])} ({DISPLAY[line['against']]})" for _, line in lab.iterrows()
    }


def _persistent_there(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Each product in both grids, by the activations. kind: W4A16 or W4A8."""
    persistent = released(PERSISTENT, kind == "W4A8")
    return where(tables.persistence(rows), model=QWEN35_35B.name, T=SOURCE_T, weights="INT4", persistent=persistent)


def _bars(rows: pd.DataFrame, change: str, xlabel: str, title: str, cause: dict[str, str]) -> Drawing:
    """The ratios of one change of ExecuTorch's own products, by case; cause: what they say of it."""
    table = _change(rows, change)
    if table.empty:
        return _not_timed(rows)
    return drawing(
        plots.ratios, table, "row", "ratio", "low", "high", group="group", verdict="verdict", xlabel=xlabel,
        title=title, alt=f"How many times faster the products are after the change, by case: {xlabel}.",
        caption=OWN_PRODUCTS, said=first_upper(next(iter(cause.values()))),
        table=named(table, "row", "group", "change"),
    )  # fmt: skip


def occupancy(rows: pd.DataFrame) -> Drawing:
    """The second cause: as many CTAs as fit over one an SM."""
    title = "What filling the SMs is worth to the persistent grid"
    return _bars(rows, FILLED, "× faster with as many CTAs as fit", title, _filling_judged(rows))


def order(rows: pd.DataFrame) -> Drawing:
    """The third cause: tile order, of experts whose weights the L2 holds."""
    title = "What the order of tiles is worth to the persistent grid"
    return _bars(rows, GROUPED, "× faster with tiles in groups", title, _order_judged(rows))


def _order_judged(rows: pd.DataFrame) -> dict[str, str]:
    """What grouping gives where only the order differs, not the code too, and what follows."""
    table = _change(rows, GROUPED)
    if table.empty:
        return {ORDER: _not_timed(rows)}
    same = table[table["same code"].astype(bool)]
    if same.empty:
        return {ORDER: "not judged: other code for each order"}
    pays = (same["verdict"] == "faster").mean() > 0.5
    word = "refuted, it pays" if pays else f"confirmed, it gains {'little' if same['ratio'].max() > 1 else 'nothing'}"
    return {ORDER: f"{word} with experts of {_expert_mb():.1f} MB: {gains(same['ratio'])}"}


def _expert_mb() -> float:
    """MB of an expert's INT4 weights in the source's model, scales included."""
    case = Case("layer", QWEN35_35B.as_dict() | {"T": SOURCE_T, "routing": UNIFORM, "weights": "INT4"})
    return work.weight_bytes(case) / work.active(case) / 1e6


def _empty_judged(rows: pd.DataFrame) -> dict[str, str]:
    """What the blocks without a token are of the grid, and what leaving them off gives."""
    table = _change(rows, *LIVE_CHANGES)
    table = table[table["dead %"].notna()] if len(table) else table
    if table.empty:
        return {EMPTY: _not_timed(rows)}
    return {EMPTY: f"{span(table['dead %'], '{:.0f}')} % of the grid; without them {gains(table['ratio'])}"}


def dead(rows: pd.DataFrame) -> Drawing:
    """What leaving off the blocks without a token saves, against what is empty of the grid."""
    table = _change(rows, *LIVE_CHANGES)
    table = table[table["dead %"].notna()] if len(table) else table
    if table.empty:
        return _not_timed(rows)
    table = table.assign(**{"saved %": 100 * (1 - 1 / table["ratio"]), "dead %": table["dead %"].round(1)})
    near = (table["saved %"] - table["dead %"]).abs() <= CLOSE
    said = f"{span(table['saved %'], '{:.0f}')} % of the time saved, within {CLOSE} points of the empty share in "
    said += f"{near.sum()} of {len(table)} cases"
    kinds = table["activations"] + ", " + table["change"].str.removeprefix(f"{LIVE}, ")
    follows = near.mean() > 0.5
    return drawing(
        plots.lines, table.assign(kind=kinds), "dead %", "saved %", "kind", joined=False, reference=[(0, "nothing")],
        xlabel="empty blocks, % of the grid", ylabel="time saved without them, %",
        title="Empty blocks cost about their share of the time" if follows else "What empty blocks cost",
        alt="Marks of the time saved without empty blocks against their share of the grid.",
        caption=f"{OWN_PRODUCTS} The grid is for the worst case; here as if the host knew which blocks hold a token.",
        said=said, table=named(table, "row", "group"),
    )  # fmt: skip


def dead_shares(tokens: Sequence[int], blocks: Sequence[int] = (16, 64)) -> pd.DataFrame:
    """Empty share of the source's grid under uniform routing by arithmetic, for every model; no measurement."""
    found = []
    for model in MODELS.values():
        for t in tokens:
            line = {"model": model.name, "T": t}
            for size in blocks:
                live = waves.expected_blocks(t, model.top_k, model.experts, size)
                share = waves.dead_share(live, experts_blocks.source_blocks(t, model.top_k, model.experts, size))
                line[f"empty %, BM={size}"] = 100 * share
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
    return named(table)


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
        said = f"Off what whole waves predict: {off.median():+.0f} % in the median of {len(off)} cases"
    return drawing(
        plots.lines, table, "tiles", "us", "part", panel="grid", xlabel="tiles", ylabel="µs",
        title="A GEMM of few tiles on fewer multiprocessors",
        alt="Lines of time against tiles, by multiprocessors and grid.",
        caption="All tokens at one expert; timed outside the blocks of the other variants.", said=said,
        table=named(table, "part"),
    )  # fmt: skip


def other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency of the source's grid on GPUs of other sizes, one column a GPU; by arithmetic."""
    table = tables.on_other_gpus(rows)
    if table.empty:
        return table
    found = table.pivot_table(index=["kernel", "GEMM", "T"], columns="GPU", values="efficiency", sort=False)
    return named(found[[gpu for gpu in waves.SMS if gpu in found]].reset_index())


def fuller(rows: pd.DataFrame) -> str:
    """Whether fewer multiprocessors mean emptier waves, by the same arithmetic."""
    table = tables.on_other_gpus(rows)
    if table.empty:
        return _not_timed(rows)
    means = table.groupby("GPU")["efficiency"].mean()[sorted(waves.SMS, key=waves.SMS.__getitem__)]
    emptier = means.is_monotonic_increasing and means.iloc[0] < means.iloc[-1] - BAND
    if emptier:
        return "the fewer multiprocessors, the emptier the waves."
    return "how full the waves are does not follow from how many multiprocessors there are."


def persistent_on_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """The persistent grid on parts of the GPU, as the page shows it."""
    return named(tables.persistent_on_parts(rows))


ledger.watch(__name__)
