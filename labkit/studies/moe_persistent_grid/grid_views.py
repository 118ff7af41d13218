"""Figures and sentences of one GEMM in both grids, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from labkit.bench.spec import Case, Study
from labkit.bench.verdict import counted, geometric_mean
from labkit.kernels.experts import blocks as experts_blocks
from labkit.report import plots
from labkit.report.words import mean as _mean
from labkit.report.words import rounded as _rounded
from labkit.report.words import sentences as _sentences
from labkit.report.words import span as _span
from labkit.report.words import tokens as _tokens
from labkit.studies.moe_persistent_grid import tables, variants, waves
from labkit.studies.moe_persistent_grid.models import MODELS, QWEN35_35B, MoeModel
from labkit.studies.moe_persistent_grid.routings import KINDS
from labkit.studies.moe_persistent_grid.wording import UNITS, Drawing, _at, _shown

ONE_WAVE, FEW_WAVES, MANY_WAVES = 1, 3, 10
FULL = 0.9  # share of the slots' time that is work, up to which a last wave leaves something to win
BAND = 0.01  # a mean ratio nearer to 1 is none
CLOSE = 5  # points of percent: a saving this near to the dead share follows from it
LOOKED_AT = (
    variants.source(16, variants.TILES), variants.BASE, variants.source(16, variants.PERSISTENT, variants.ONCE),
    variants.source(64, variants.TILES), variants.source(16, variants.TILES, int8=True), variants.OURS_TILES,
)  # fmt: skip


# The grid


def grid(rows: pd.DataFrame) -> Drawing:
    """One CTA a tile / persistent against waves: the first cause."""
    table = tables.persistence(rows)
    table = table[table["waves"].notna()]
    if table.empty:
        return "no kernel was measured in both grids, with its tiles known."
    pairs = zip(table["kernel"], table["persistent"], strict=True)
    table = table.assign(pair=[_pair(*pair) for pair in pairs], at=table["waves"].map(_rounded))
    fig = plots.lines(
        table, "at", "ratio", "pair", panel="GEMM", logx=True, joined=False, reference=[(1, "same")],
        xlabel="waves of one CTA a tile", ylabel="one CTA a tile / persistent", title="When a persistent grid pays",
    )  # fmt: skip
    said = _by_waves(table)
    return {
        "fig": fig,
        "alt": f"Marks of the ratio of both grids' times against waves, by kernel. {said}.",
        "caption": f"Above 1 the persistent grid is faster. Waves: tiles over the CTAs that the GPU holds. {said}.",
        "table": _shown(table, "pair", "at"),
    }


def _pair(kernel: str, persistent: str) -> str:
    return f"{kernel}, {variants.FILLED}" if persistent == variants.OURS_FILLED else kernel


def _by_waves(table: pd.DataFrame) -> str:
    """Mean ratios by waves, of as many programs as fit: the second cause is then left out; and what follows."""
    full = table[table["persistent"] == variants.OURS_FILLED]
    if full.empty:
        return f"Ours was not measured with {variants.FILLED}"
    few, many = full["waves"].between(ONE_WAVE, FEW_WAVES, "right"), full["waves"] >= MANY_WAVES
    some = {
        f"up to {ONE_WAVE} wave": full["waves"] <= ONE_WAVE, f"{ONE_WAVE} to {FEW_WAVES} waves": few,
        f"{MANY_WAVES} waves and more": many,
        f"at most {FULL:.0%} of the slots' time is work".replace("%", " %"): full["efficiency"] <= FULL,
    }  # fmt: skip
    parts = [f"{words} {_brief(full[these])}" for words, these in some.items() if these.any()]
    said = [f"Ours with {variants.FILLED}: {'; '.join(parts)}", _costs_ctas(table)]
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
    return (
        f"The loop over tiles takes registers: fewer CTAs of the persistent kernel fit in {fewer} of {len(pairs)} pairs"
    )


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
        f"in {len(table) - same} of {len(table)} pairs the bits differ, first in {odd['model']}, {_tokens(odd['T'])}, "
        f"{odd['GEMM']}, {odd['kernel']}."
    )


def source_point(rows: pd.DataFrame) -> pd.DataFrame:
    """The source's own case, by variant."""
    units = {"us": "µs, both", "GEMM1 us": "GEMM1 µs", "GEMM2 us": "GEMM2 µs"}
    return tables.source_point(rows).rename(columns=units)


def tuned_point(rows: pd.DataFrame) -> pd.DataFrame:
    """Each GEMM of the source's own case, each grid with the fastest of its tiles."""
    return tables.tuned_point(rows).rename(columns={"us": "µs", "persistent us": "persistent µs"})


def why(rows: pd.DataFrame) -> str:
    """The source's own case in words: both GEMMs, their code, occupancy, loads, what is dead."""
    table = tables.source_point(rows).set_index("variant")
    tiles, base = variants.source(16, variants.TILES), variants.BASE
    if not {tiles, base} <= set(table.index):
        return f"the case of {QWEN35_35B.name} at {tables.SOURCE_T} tokens was not measured."
    said = f"with blocks of 16 rows and W4A16, one CTA a tile / persistent is ×{table['tiles / this'][base]:.3f}"
    said += _each_gemm(rows)
    return f"{said}. " + _sentences(
        [_other_code(table), _fitting(table), _loads(table), _dead(table), ours_there(rows)], ""
    )


def _each_gemm(rows: pd.DataFrame) -> str:
    """The same ratio of each GEMM, with its interval."""
    table = tables.persistence(rows)
    point = (table["model"] == QWEN35_35B.name) & (table["T"] == tables.SOURCE_T) & (table["weights"] == "INT4")
    table = table[point & (table["persistent"] == variants.BASE)]
    parts = [
        f"×{line['ratio']:.3f} [{line['low']:.3f}, {line['high']:.3f}] of {line['GEMM']}"
        for _, line in table.iterrows()
    ]
    noise = table["noise"].max()
    return f" ({', '.join(parts)}" + (f"; A/A within ±{100 * noise:.1f} %)" if noise == noise else ")")


def _other_code(table: pd.DataFrame) -> str:
    """What the loop over tiles makes of each GEMM's kernel."""
    tiles, base = (table.loc[name] for name in (variants.source(16, variants.TILES), variants.BASE))
    columns = {"GEMM1": ("registers", "CTAs an SM"), "GEMM2": ("GEMM2 registers", "GEMM2 CTAs")}
    parts = [
        f"{gemm} {tiles[registers]:.0f} → {base[registers]:.0f} registers, {tiles[ctas]:.0f} → {base[ctas]:.0f} CTAs"
        for gemm, (registers, ctas) in columns.items()
        if base[registers] == base[registers] and tiles[registers] == tiles[registers]
    ]
    return f"The loop over tiles makes other code: {'; '.join(parts)} that fit an SM." if parts else ""


def _fitting(table: pd.DataFrame) -> str:
    base, filled = variants.BASE, variants.FILLED_BASE
    said = ""
    if table["CTAs an SM"][base] == table["CTAs an SM"][base]:
        said = f"Of GEMM1 {table['CTAs an SM'][base]:.0f} CTAs fit an SM and {table['launched an SM'][base]:.0f} is "
        said += "launched. "
    if filled in table.index:
        said += f"As many as fit are ×{table['us'][base] / table['us'][filled]:.3f} over one, "
        said += f"and ×{table['tiles / this'][filled]:.3f} over one CTA a tile ("
        tiles = table.loc[variants.source(16, variants.TILES)]
        each = [f"{gemm} ×{tiles[f'{gemm} us'] / table[f'{gemm} us'][filled]:.3f}" for gemm in ("GEMM1", "GEMM2")]
        said += f"{', '.join(each)})."
    return said.strip()


def _loads(table: pd.DataFrame) -> str:
    """What loads of single bytes cost."""
    base, once = variants.BASE, variants.source(16, variants.PERSISTENT, variants.ONCE)
    if once not in table.index:
        return ""
    said = f"Each byte of a weight loaded once, not twice, gives ×{table['us'][base] / table['us'][once]:.3f}"
    loads = table["8-bit loads"]
    if loads[base] == loads[base] and loads[once] == loads[once]:
        said += f": the code has {loads[base]:.0f} loads of 8 bits before and {loads[once]:.0f} after"
    return f"{said}."


def ours_there(rows: pd.DataFrame) -> str:
    """The lab's two GEMMs at the source's own point beside the fastest of its variants."""
    us = tables.source_point(rows).set_index("variant")["us"]
    ours = us.get(variants.OURS_TILES)
    us = us.drop(variants.OURS_TILES, errors="ignore")
    if ours is None or us.empty:
        return ""
    return (
        f"At the source's own point the lab's two GEMMs, one CTA a tile, take {ours:.0f} µs, and the fastest of its "
        f"variants ({us.idxmin()}) ×{us.min() / ours:.2f} as long."
    )


def _dead(table: pd.DataFrame) -> str:
    base, early = variants.BASE, variants.source(16, variants.PERSISTENT, variants.EARLY)
    if early not in table.index or table["dead %"][base] != table["dead %"][base]:
        return ""
    gain = table["us"][base] / table["us"][early]
    return f"{table['dead %'][base]:.1f} % of the blocks are dead, and leaving them off gives ×{gain:.3f}."


def occupancy(rows: pd.DataFrame) -> Drawing:
    """The second cause: SMs × occupancy over one program an SM, by the CTAs that fit."""
    table = tables.filling(rows)
    if table.empty:
        return f"{variants.FILLED} was not measured."
    table = table.assign(row=_at(table), group=_groups(table))
    fig = plots.ratios(
        table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time one program an SM / time as many as fit (above 1: filling pays)", title="What occupancy is worth",
    )  # fmt: skip
    said = _of_filling(table)
    return {
        "fig": fig,
        "alt": f"Ratios of time with one program an SM over time with as many as fit, by case. {said}.",
        "caption": f"The source's persistent kernel, blocks of 16 rows. {said}.",
        "table": _shown(table, "row", "group"),
    }


def _of_filling(table: pd.DataFrame) -> str:
    """How much, of how many programs, what it leaves of the loss against one CTA a tile, and what follows."""
    said = [f"×{_span(table['ratio'])}, {counted(table['verdict'])} of {len(table)} cases"]
    parts = [
        f"{weights} {_span(part['gain / programs'])} with {_span(part['programs'], '{:.0f}')} programs an SM"
        for weights, part in table.dropna(subset=["programs"]).groupby("weights")
    ]
    said += [f"Gain over their number: {'; '.join(parts)}"] if parts else []
    left = [
        f"{gemm} {_mean(part['tiles / filled'])}"
        for gemm, part in table.dropna(subset=["tiles / filled"]).groupby("GEMM")
    ]
    said += [f"One CTA a tile / as many as fit: {'; '.join(left)}"] if left else []
    pays = (table["verdict"] == "faster").mean() > 0.5
    said.append(
        f"Second cause: {'confirmed, filling the SMs pays' if pays else 'refuted, filling the SMs gains little'}"
    )
    return ". ".join(said)


def _groups(table: pd.DataFrame) -> list[str]:
    columns = (table["model"], table["weights"], table["GEMM"])
    return [", ".join(words) for words in zip(*columns, strict=True)]


def order(rows: pd.DataFrame) -> Drawing:
    """The third cause: tile order, on fine-grained experts and on Mixtral's."""
    table = tables.order(rows)
    if table.empty:
        return "no tile orders were measured."
    lines = zip(table["model"], table["weights"], table["T"], strict=True)
    table = table.assign(line=[f"{model}, {weights}, {_tokens(t)}" for model, weights, t in lines])
    fair = table.groupby([*tables.CASE, "GEMM"])["as groups of 1"].transform("all")
    if not fair.any():
        return "the compiler makes other code of groups of 1 in every case, so that the order cannot be told from it."
    fig = plots.lines(
        table[fair], "groups of", "ratio", "line", panel="GEMM", logx=True, reference=[(1, "groups of 1")],
        xlabel="GROUP_SIZE_M", ylabel="time groups of 1 / time", title="Tile order, the same code",
    )  # fmt: skip
    said = _of_order(table[fair], table[~fair])
    return {
        "fig": fig,
        "alt": f"Lines of time with groups of 1 over time with larger groups, by model and tokens. {said}.",
        "caption": f"Above 1: grouping pays. {said}.",
        "table": _shown(table, "line"),
    }


def _of_order(fair: pd.DataFrame, other: pd.DataFrame) -> str:
    """What grouping gives where only the order differs, where the code does too, what was counted, what follows."""
    large = fair[fair["groups of"] > 1]
    if large.empty:
        return "Only one order was measured"
    groups = large.groupby(["model", "GEMM"], sort=False)
    parts = [
        f"{model}, {gemm} ({_span(part['MB an expert'], '{:.1f}')} MB an expert) ×{_span(part['ratio'])}"
        for (model, gemm), part in groups
    ]
    said = ["; ".join(parts)]
    other, hits = other[other["groups of"] > 1], fair[fair["L2 hits %"].notna()]
    if len(other):
        said.append(
            f"Left out: {len(other.groupby([*tables.CASE, 'GEMM']))} cases (×{_span(other['ratio'])}) in which the "
            "compiler makes other code of groups of 1, with other registers, so that the ratio is not the order's"
        )
    said += [f"Sectors that the L2 had: {_span(hits['L2 hits %'], '{:.0f}')} %"] if len(hits) else []
    means = large.groupby("model").agg(size=("MB an expert", "max"), gain=("ratio", "max")).sort_values("size")
    if len(means) > 1:
        small, big = means["gain"].iloc[0], means["gain"].iloc[-1]
        pays = big > max(1, small) + 2 * BAND
        said.append(
            f"Third cause: {'confirmed' if pays else 'refuted'}, grouping gives at most ×{big:.2f} in the model whose "
            f"experts are largest and ×{small:.2f} where they are smallest"
        )
    return ". ".join(said)


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """What each change of the source's kernel is worth."""
    return tables.worth(rows)


def pays(rows: pd.DataFrame) -> str:
    """Which changes are faster in every case, which slower, and which depend on the case; tile order apart."""
    table = tables.worth(rows)
    table = table[~table["over"].isin([variants.grouped(1)])]
    if table.empty:
        return "no change was measured."
    faster, slower = (table[word] == table["cases"] for word in ("faster", "slower"))
    groups = (
        ("Faster in every case", faster),
        ("Slower in every case", slower),
        ("It depends, or is the same", ~faster & ~slower),
    )
    said = [f"{words}: {'; '.join(_changes(table[some]))}." for words, some in groups if some.any()]
    return " ".join(said)


def _changes(table: pd.DataFrame) -> list[str]:
    """Changes in words, each with its ratios for each kind of weights."""
    found = []
    for (after, before), part in table.groupby(["change", "over"], sort=False):
        ratios = [f"{line['weights']} ×{_span(line[['least', 'most']])}, {_won(line)}" for _, line in part.iterrows()]
        found.append(f"{_change(after, before)} ({'; '.join(ratios)})")
    return found


def _won(line: pd.Series) -> str:
    return f"faster in {line['faster']} of {line['cases']}"


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
    fig = plots.lines(
        table, "dead %", "saved %", "grid", panel="weights", joined=False, reference=[(0, "nothing")],
        xlabel="dead blocks, %", ylabel="time saved by early exit, %", title="What dead blocks cost",
    )  # fmt: skip
    near = (table["saved %"] - table["dead %"]).abs() <= CLOSE
    said = (
        f"{_span(table['dead %'], '{:.0f}')} % dead, {_span(table['saved %'], '{:.0f}')} % of the time saved: within "
    )
    said += f"{CLOSE} points of what is dead in {near.sum()} of {len(table)} cases, less in "
    said += f"{(~near & (table['saved %'] < table['dead %'])).sum()}, more in "
    said += f"{(~near & (table['saved %'] > table['dead %'])).sum()}; early exit is {counted(table['verdict'])}"
    return {
        "fig": fig,
        "alt": f"Marks of the time saved by early exit against the dead share of the grid. {said}.",
        "caption": f"The source's kernel with blocks of 16 rows; its grid is for the worst case. {said}.",
        "table": _shown(table),
    }


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
    shape = QWEN35_35B.as_dict() | {"T": tables.SOURCE_T, "routing": KINDS[0], "weights": "INT4", "activations": "bf16"}
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
    fig = plots.lines(
        table, "tiles", "us", "part", panel="grid", xlabel="tiles", ylabel="µs",
        title="A GEMM of few tiles on fewer multiprocessors",
    )  # fmt: skip
    known = table[table["predicted"].notna()]
    off = 100 * (known["measured"] / known["predicted"] - 1)
    said = f"Measured over predicted by whole waves: {off.median():+.0f} % in the median of {len(off)}, "
    said += f"{off.min():+.0f} to {off.max():+.0f} %" if len(off) else ""
    said = said if len(off) else "No part of the GPU was measured beside all of it"
    return {
        "fig": fig,
        "alt": f"Lines of time against tiles, by multiprocessors and grid. {said}.",
        "caption": f"All tokens at one expert; timed outside the blocks of the other variants. {said}.",
        "table": table.drop(columns=["part"]).rename(columns=UNITS),
    }


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether the persistent grid pays more on fewer multiprocessors: one CTA a tile / persistent on each part."""
    table = tables.persistent_on_parts(rows)
    if table.empty:
        return table
    return _shown(table.sort_values(["T", "SMs"], ascending=[True, False]))


def other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency of the source's grid on GPUs of other sizes, one column a GPU; by arithmetic."""
    table = _on_gpus(rows)
    if table.empty:
        return table
    index = ["model", "GEMM", "T"]
    found = table.pivot_table(index=index, columns="GPU", values="efficiency", sort=False)
    return found[[gpu for gpu in waves.SMS if gpu in found]].reset_index()


def _on_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the source's weights, which are INT4, where those were timed."""
    table = tables.on_other_gpus(rows)
    return table[table["weights"] == "INT4"] if (table["weights"] == "INT4").any() else table


def fuller(rows: pd.DataFrame) -> str:
    """Whether fewer multiprocessors mean emptier waves, by the same arithmetic."""
    table = _on_gpus(rows)
    if table.empty:
        return "there is no such measurement."
    shares = {gpu: table[table["GPU"] == gpu]["efficiency"] for gpu in sorted(waves.SMS, key=waves.SMS.__getitem__)}
    parts = [f"{gpu} ({waves.SMS[gpu]} SMs) {some.mean():.3f}" for gpu, some in shares.items()]
    smallest, *_, largest = (some.mean() for some in shares.values())
    follows = "the fewer, the emptier" if smallest < largest - BAND else "fewer multiprocessors are no emptier"
    return f"the mean of each column is {', '.join(parts)}: {follows}."
