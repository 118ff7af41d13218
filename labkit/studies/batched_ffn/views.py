"""Figures and short answers of the study, each made from the rows of one GPU, or from none."""

from collections.abc import Sequence
from functools import partial
from itertools import product

import pandas as pd

from labkit.bench import ledger
from labkit.bench.spec import Case
from labkit.bench.tables import where
from labkit.bench.verdict import counted, geometric_mean
from labkit.kernels.gguf.choose import matrix_rule, rule
from labkit.kernels.offload import policies as cache
from labkit.report import plots, words
from labkit.report.figures import Drawing, drawing, view
from labkit.studies.batched_ffn import claims, tables, variants

SHOWN = (variants.PER_TOKEN, variants.GEMM_N, variants.STATIONARY, variants.MATRIX, variants.WIDE, variants.CUBLAS)
ROUTED = (variants.PER_TOKEN, variants.ROWCOPY, variants.INDEXED, variants.INDEXED_MATRIX, variants.INDEXED_INTEGERS)
ROUTED += (variants.GROUPED_MM,)
ISSUED = {  # formats of `issued`
    "instructions a weight": "{:.1f}", "µs to issue them": "{:.1f}", "µs": "{:.1f}", "issuing, % of its time": "{:.0f}",
    "% of reading": "{:.0f}",
}  # fmt: skip
UNITS = {"us": "µs", "us a token": "µs a token", "against us": "library µs"}
BARS = {  # format -> percent of the plain read, for the multiply-add family up to 2 tokens, and for the other up to 8
    "BF16": 80, "Q8_0": 80, "Q4_K": 80, "Q5_K": 70, "Q6_K": 70,
}  # fmt: skip
AIMS = "; ".join(f"{format} {percent} %" for format, percent in BARS.items())
FORMAT = "Q4_K"  # whose times are drawn first
ROWS, COLUMNS = variants.DENSE[variants.MAIN][::-1]  # of the product that is drawn; tables have all
WHO = {tables.OWN: "this lab", tables.LIBRARY: "library"}

_by_tokens = partial(drawing, plots.lines, x="N", logx=True, xlabel="tokens", units=UNITS)
_products = partial(tables.times, op="product")
_beside_cublas = partial(tables.beside, op="product", against=variants.CUBLAS)
ALONE = tables.ALONE["product"]


def _drawn(table: pd.DataFrame) -> pd.DataFrame:
    """The lines of the product that is drawn; all where it was not measured."""
    some = where(table, rows=ROWS, K=COLUMNS)
    return some if len(some) else table


def _mean(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Geometric mean of the ratios of the first model's products, or of all where there are none of it."""
    if {"rows", "K"} <= set(table) and table["rows"].isin((ROWS, COLUMNS)).any():
        table = table[table["rows"].isin((ROWS, COLUMNS))]
    return table.groupby(list(by), sort=False)["ratio"].agg(geometric_mean).reset_index()


@view(lambda rows: where(_products(rows), rows=ROWS, variant=SHOWN), f"no product of {ROWS} rows was measured.")
def time_per_token(table: pd.DataFrame) -> Drawing:
    """µs a token against the number of tokens, by variant, of one shape and format; the table has all formats."""
    first = FORMAT if (table["format"] == FORMAT).any() else table["format"].iloc[0]
    some = where(table, format=first)
    fast = [_fastest(some[some["N"] == n]) for n in (some["N"].min(), some["N"].max())]
    return _by_tokens(
        some, y="us a token", series="variant", logy=True, ylabel="µs a token (log)",
        title=f"{first}: a token costs less the more share a read",
        caption=f"One product, {ROWS} × {COLUMNS}, cold weights, CUDA graph. The table has every format.",
        alt="Lines of µs a token against tokens, by kernel.", said=f"Fastest: {', '.join(dict.fromkeys(fast))}",
        table=table, hidden=["rows", "K", "role", "MB"],
    )  # fmt: skip


def _fastest(table: pd.DataFrame) -> str:
    best = table.loc[table["us"].idxmin()]
    return f"{best['variant']} at {words.tokens(best['N'])}"


def _other_formats(rows: pd.DataFrame) -> pd.DataFrame:
    table = where(_products(rows), rows=ROWS, variant=SHOWN)
    return table[table["format"] != FORMAT]


@view(_other_formats, f"no other format of a product of {ROWS} rows was measured.")
def other_formats(table: pd.DataFrame) -> Drawing:
    """The same for the other formats."""
    return _by_tokens(
        table, y="us a token", series="variant", panel="format", logy=True, ylabel="µs a token (log)",
        title="The other formats", caption="Cold weights, CUDA graph.",
        alt="Lines of µs a token against tokens, by kernel and format.", hidden=["rows", "K", "role", "MB"],
    )  # fmt: skip


def read_percent(rows: pd.DataFrame, variant: str = variants.MATRIX) -> Drawing:
    """Percent of a plain cold read of the same stored bytes, by format and tokens, of one shape; said: of all."""
    table = where(_products(rows), variant=variant).dropna(subset="% of reading")
    if table.empty:
        return f"{variant} was not measured beside a plain read."
    least = table[table["N"] == table["N"].min()]
    return _by_tokens(
        _drawn(table), y="% of reading", series="format", reference=[(100, "a plain read")],
        ylabel="% of the speed of a plain read",
        said=f"At {words.tokens(least['N'].iloc[0])} {words.span(least['% of reading'], '{:.0f}')} % in all shapes",
        title=f"{variant}: how near to a plain read",
        alt="Lines of percent of a plain read's speed against tokens, by format.",
        caption=f"{ROWS} × {COLUMNS}. A plain read of as many cold bytes, in the same blocks, is 100 %. The table has "
        "every shape.",
        table=table.assign(shape=_shapes(table))[["shape", "format", "N", "us", "% of reading"]],
    )  # fmt: skip


multiply_add_percent = partial(read_percent, variant=variants.STATIONARY)
integers_percent = partial(read_percent, variant=variants.INTEGERS)


def _shapes(table: pd.DataFrame) -> pd.Series:
    return table["rows"].astype(str) + " × " + table["K"].astype(str)


@view(
    partial(tables.compared, op="product", variant=variants.INTEGERS, against=variants.MATRIX),
    f"{variants.INTEGERS} was not timed beside {variants.MATRIX}.",
)
def integers(table: pd.DataFrame) -> Drawing:
    """What leaving the weights integers is worth in the matrix family, by format and tokens."""
    ends = [n for n in dict.fromkeys((claims.TOKENS, table["N"].max())) if (table["N"] == n).any()]
    mean = [f"{words.faster(geometric_mean(table[table['N'] == n]['ratio']))} at {words.tokens(n)}" for n in ends]
    return _by_tokens(
        _mean(table, "format", "N"), y="ratio", series="format", reference=[(1, "as fast")],
        ylabel="× faster with integers", title="Integers into the tensor cores: a gain while tokens are few",
        alt="Lines of the gain of integers over bf16 weights against tokens, by format.",
        caption="Geometric mean of the 27B model's two shapes; the table has every shape and the A/A noise.",
        said=f"All shapes: {', '.join(mean)}", table=table, hidden=["no slower"],
    )  # fmt: skip


def _designs(rows: pd.DataFrame, design: str) -> pd.DataFrame:
    """The lines of `tables.designs` of one design."""
    formats = [format for format, (name, _) in variants.DESIGNED.items() if name == design]
    return where(tables.designs(rows), format=formats)


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={"us": "µs", "against us": "its µs", "N": "tokens"})


def _of_library(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Lines of the lab's other kernels, and of cuBLAS."""
    library = table["against"] == variants.CUBLAS
    return table[~library], table[library]


def _gains(table: pd.DataFrame) -> str:
    """How much faster on average by tokens: "1.20× faster at 8 tokens, …"."""
    mean = table.groupby("N")["ratio"].agg(geometric_mean)
    return ", ".join(f"{words.faster(gain)} at {words.tokens(n)}" for n, gain in mean.items())


def specialised(rows: pd.DataFrame) -> pd.DataFrame:
    """Specialised warps against the fastest other kernel and cuBLAS, by format, shape and tokens."""
    return _shown(_designs(rows, variants.SPECIALISED))


def specialised_said(rows: pd.DataFrame) -> str:
    """How much faster specialised warps are, and how near they come to a plain read."""
    own, library = _of_library(_designs(rows, variants.SPECIALISED))
    if own.empty:
        return "Specialised warps were not timed on this GPU."
    said = [f"Specialised warps are {counted(own['verdict'])} of {len(own)} cases."]
    for n, some in own.groupby("N"):
        gain, reached = words.faster(geometric_mean(some["ratio"])), words.span(some["% of reading"], "{:.0f}")
        said.append(f"At {words.tokens(n)}: {gain}, at {reached} % of a plain read's speed.")
    if len(library):
        said.append(f"Than cuBLAS in bf16 they are {counted(library['verdict'])} of {len(library)} cases.")
        said.append(f"On average: {_gains(library)}.")
    return " ".join(said)


def continued(rows: pd.DataFrame) -> pd.DataFrame:
    """Continued sums of BF16 against the fastest other kernel and cuBLAS, by shape and tokens."""
    return _shown(_designs(rows, variants.CONTINUED)).drop(columns="% of reading")


def continued_said(rows: pd.DataFrame) -> str:
    """How much faster continued sums are than the lab's other kernels and than cuBLAS, by tokens."""
    own, library = _of_library(_designs(rows, variants.CONTINUED))
    if own.empty:
        return "Continued sums were not timed on this GPU."
    against = {"the fastest other kernel of the lab": own, "cuBLAS": library}
    said = [f"against {name}: {_gains(table)}" for name, table in against.items()]
    return f"Continued sums {'; '.join(said)} (averages of both shapes)."


def floor_cases(some: Sequence[Case]) -> list[Case]:
    """The products of the first shape and format."""
    products = [x for x in some if x.op == "product"]
    first = {name: products[0][name] for name in ("rows", "K", "format")} if products else {}
    return [x for x in products if first.items() <= dict(x.params).items()]


def choices(formats: Sequence[str], tokens: Sequence[int]) -> pd.DataFrame:
    """What the rules choose for the first model, by shape, format and tokens; how often a variant asks for all weights.

    Formats for which they choose the same are one row.
    """
    found = []
    hidden, width = next(iter(variants.DENSE.values()))
    for (rows, K), n, format in product(((width, hidden), (hidden, width)), tokens, formats):
        made = {variants.STATIONARY: rule(n, rows, K, format), variants.MATRIX: matrix_rule(n, rows, K, format)}
        for variant, choice in made.items():
            line = {"rows": rows, "K": K, "variant": variant, "N from": n, "format": format}
            line |= {"blocks": choice.blocks, "tokens": choice.tokens, "warps": choice.num_warps}
            line |= {"shares": choice.shares, "ahead": choice.ahead, "dependent": "yes" if choice.dependent else "no"}
            found.append(line | {"passes": tables.passes(variant, line | {"N": n})})
    table = pd.DataFrame(found)
    table = table[~table.drop(columns="N from").duplicated()]
    alike = [name for name in table if name != "format"]
    return table.groupby(alike, sort=False)["format"].agg(", ".join).reset_index()


def compiled_cases() -> list[tuple[Case, str]]:
    """The kernels whose code is shown, at a small shape."""
    shape = {"rows": 1024, "K": 1024, "format": "Q8_0", "activations": "bf16"}
    return [
        (Case("product", shape | {"N": 8}), name) for name in (variants.GEMM_N, variants.STATIONARY, variants.MATRIX)
    ]


def compiled_table(table: pd.DataFrame) -> pd.DataFrame:
    """What the compiler made of them."""
    columns = ["variant", "arch", "registers", "spill_bytes", "shared_bytes", "loads", "matrix", "shuffles", "barriers"]
    return table[[name for name in columns if name in table]]


def failures(rows: pd.DataFrame) -> dict[str, str]:
    """Where the lab's one family of bits loses, what it costs, and what a cache costs; of what was measured."""
    found = {}
    beside, price = _beside_cublas(rows), tables.price(rows)
    kinds = {"quantised": beside[~beside["format"].isin(claims.UNPACKED)]}
    kinds |= {"F32, BF16": beside[beside["format"].isin(claims.UNPACKED)]}
    for kind, table in kinds.items():
        if len(table):
            found[f"Cases in which bf16 cuBLAS is faster, {kind}"] = _lost(table)
    if len(price):
        ratio = geometric_mean(price["price"])
        found[f"{ALONE} against the fastest kernel of each case, mean"] = words.faster(1 / ratio)
        found["The same, at worst"] = words.faster(1 / price["price"].max())
    found |= cache_costs(rows)
    return found


def _lost(table: pd.DataFrame) -> str:
    slower = table[table["verdict"] == "slower"]
    ledger.note("slower", {"slower": len(slower), "cases": len(table)})
    said = f"{len(slower)} of {len(table)}"
    return f"{said}, from {words.tokens(slower['N'].min())} on" if len(slower) else said


def losses(rows: pd.DataFrame) -> dict[str, str]:
    """By format in how many cases a library is faster, from how many tokens on, and by how much at most."""
    found = {}
    for format, table in _beside_cublas(rows).groupby("format", sort=False):
        most = table["ratio"].min()
        found[format] = _lost(table) + (f", at most {1 / most:.2f}×" if (table["verdict"] == "slower").any() else "")
    return found


@view(tables.gains, "the loop, one launch, and weights read once were not timed beside each other.")
def gains(table: pd.DataFrame) -> Drawing:
    """What one launch is worth, and what reading the weights once, against the number of tokens."""
    series = table["step"].where(table["step"] == "one launch", table["step"] + table["format"].map(_kind))
    mean = _mean(table.assign(series=series), "series", "N")
    return _by_tokens(
        mean, y="ratio", series="series", logy=True, reference=[(1, "no gain")],
        ylabel="× faster than before (log)", title="Reading once gains with every token, one launch does not",
        alt="Lines of the gain of each change against tokens, of reading once for each kind of weights.",
        caption="Geometric means of the 27B model's two shapes; the table has every format and shape. In a CUDA graph "
        "a launch costs the GPU's time alone.",
        table=table, hidden=["no slower"],
    )  # fmt: skip


def _kind(format: str) -> str:
    """Of weights: what else than reading is saved."""
    return f", {format}" if format in claims.UNPACKED else ", quantised"


def launches(rows: pd.DataFrame) -> pd.DataFrame:
    """Launches and how often all weights are read, by tokens."""
    table = _products(rows).dropna(subset=["launches", "passes"]).drop_duplicates(["variant", "N"])
    table = table.assign(text=[f"{n:.0f}, {p:.0f}" for n, p in zip(table["launches"], table["passes"], strict=True)])
    return table.pivot(index="N", columns="variant", values="text").fillna("").reset_index()


def arithmetic(rows: pd.DataFrame) -> pd.DataFrame:
    """What arithmetic allows the multiply-add family at most, at one shape."""
    table = tables.arithmetic(rows)
    first = table[table["rows"].isin(table["rows"].head(1)) & (table["N"] <= 8)]
    return first.drop(columns=["rows", "K"]).rename(columns=UNITS)


def issued(rows: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """The same of tensor_core, counted in its code, of few tokens."""
    table = tables.issued(rows, launches)
    first = table[table["rows"].isin(table["rows"].head(1)) & table["N"].isin([1, 8])]
    names = {"issue µs": "µs to issue them", "% of issue": "issuing, % of its time"}
    return first.drop(columns=["rows", "K"]).rename(columns=UNITS | names)


def bars(rows: pd.DataFrame) -> dict[str, str]:
    """How many cases of few tokens are below `BARS`, by family of bits."""
    table = where(_products(rows), format=list(BARS)).dropna(subset="% of reading")
    families = {variants.STATIONARY: 2, variants.MATRIX: 8, variants.INTEGERS: 8}
    parts = {(name, n): table[(table["variant"] == name) & (table["N"] <= n)] for name, n in families.items()}
    return {f"{name}, up to {n} tokens": _below(part) for (name, n), part in parts.items() if len(part)}


def _below(table: pd.DataFrame) -> str:
    """How many of one family's cases do not reach their bar, and the worst of them."""
    below = table[table["% of reading"] < table["format"].map(BARS)]
    ledger.note("below", {"cases": len(table), "below": len(below)})
    said = f"{len(below)} of {len(table)} cases below"
    if below.empty:
        return said
    worst = below.loc[below["% of reading"].idxmin()]
    place = f"{worst['format']}, {worst['rows']} × {worst['K']}, N = {worst['N']}"
    return f"{said}, the least {worst['% of reading']:.0f} % ({place})"


def against_cublas(rows: pd.DataFrame, op: str = "product", against: str = variants.CUBLAS) -> Drawing:
    """A library's time over that of one family of bits, by format and tokens."""
    table, alone = tables.beside(rows, op, against), tables.ALONE[op]
    if table.empty:
        return f"{against} was not timed beside the lab's variants of this operation."
    return _by_tokens(
        _mean(table, "format", "N"), y="ratio", series="format", logy=True, reference=[(1, "as fast")],
        ylabel=f"× faster than {against} (log)", title=f"{alone} against {against}",
        said=f"{alone} is {counted(table['verdict'])} of {len(table)} cases",
        alt=f"Lines of how much faster {alone} is than {against}, by format and tokens.",
        caption=f"One set of bits at every number of tokens, geometric mean of shapes. {MEAN_OF[op]}"
        f"The table has every case, and the fastest of the lab's kernels in it ({tables.MIXED}).",
        table=table, hidden=["no slower"],
    )  # fmt: skip


MEAN_OF = {"product": "Drawn: the 27B model's two shapes. ", "ffn": "", "routed": ""}

dequantised = partial(against_cublas, against=variants.DEQUANTISED)  # the weak rival: in every call
layers = partial(against_cublas, op="ffn")
grouped_mm = partial(against_cublas, op="routed", against=variants.GROUPED_MM)


def price(rows: pd.DataFrame) -> dict[str, str]:
    """What the same bits in every batch cost, against the fastest of all; what following the fastest would."""
    table = tables.price(rows)
    if table.empty:
        return {}
    worst, mixed = table.loc[table["price"].idxmax()], table["mixed price"]
    best = int((table["price"] == 1).sum())
    ledger.note("best", {"fastest": best, "cases": len(table)})
    place = f"{worst['format']}, {worst['rows']} × {worst['K']}, N = {worst['N']}, against {worst['fastest']}"
    return {
        f"Cases in which {ALONE} is the fastest of all": f"{best} of {len(table)}",
        f"{ALONE} against the fastest, geometric mean": words.faster(1 / geometric_mean(table["price"])),
        "at worst": f"{words.faster(1 / worst['price'])} ({place})",
        "The fastest of the lab's kernels in each case, geometric mean": words.faster(1 / geometric_mean(mixed)),
        "its worst": words.faster(1 / mixed.max()),
    }


def _same(table: pd.DataFrame) -> str:
    ledger.note("same", table[["same", "cases"]].sum().to_dict())
    return f"{table['same'].sum()} of {table['cases'].sum()}"


def bits(rows: pd.DataFrame) -> dict[str, str]:
    """In how many cases a token alone has the bits of its batch: of the lab's kernels, libraries, sums by atomics."""
    table = tables.bits(rows)
    parts = {"kernels of this lab": table[table["who"] == tables.OWN]}
    parts |= {"libraries": table[table["who"] == tables.LIBRARY]}
    parts |= {"control: sums by atomics": table[table["variant"] == variants.SPLIT_K]}
    return {who: _same(part) for who, part in parts.items() if len(part)}


def bits_by_variant(rows: pd.DataFrame) -> pd.DataFrame:
    """The same of each kernel."""
    table = tables.bits(rows)
    return table.assign(who=table["who"].replace(WHO)).rename(columns={"who": "of"})


def gemlite(rows: pd.DataFrame) -> dict[str, str]:
    """gemlite's distance from the floor of its own bytes over that of `ALONE`: mean and span of each format."""
    table = tables.gemlite(rows)
    parts = {format: part["better"] for format, part in table.groupby("format", sort=False)}
    found = {f"{format}, geometric mean": f"{geometric_mean(part):.2f} ({words.span(part)})"
             for format, part in parts.items()}  # fmt: skip
    if len(table):
        found["all, geometric mean"] = f"{geometric_mean(table['better']):.2f}"
        found["all, the fastest of the lab's kernels in each case"] = f"{geometric_mean(table['mixed better']):.2f}"
    return found


def reuse(tokens: Sequence[int]) -> Drawing:
    """Tokens that share an expert under uniform routing: predicted and drawn."""
    table = tables.reuse(tokens)
    tidy = table.rename(columns={"reuse, predicted": "predicted", "reuse": "drawn"})
    last = table.iloc[-1]
    return _by_tokens(
        tidy.melt("N", ["predicted", "drawn"], var_name="series", value_name="reuse"), y="reuse", series="series",
        logy=True, ylabel="tokens an expert (log)", title="How often an expert's bytes are used",
        said=f"N = {last['N']:.0f}: predicted {last['reuse, predicted']:.1f}, drawn {last['reuse']:.1f}",
        alt="Lines of slots a distinct expert against tokens, predicted and drawn.",
        caption="N · top_k / distinct experts, synthetic uniform routing.", table=table,
    )  # fmt: skip


@view(partial(tables.times, op="routed"), "routed experts were not measured.")
def routed(table: pd.DataFrame) -> Drawing:
    """Routed experts, all there: µs against tokens by variant."""
    said, indexed = "", (variants.INDEXED, variants.INDEXED_MATRIX, variants.INDEXED_INTEGERS)
    near = where(table, variant=indexed).dropna(subset="% of reading")
    if len(near):
        best = near.loc[near["% of reading"].idxmax()]
        said = f"Nearest to a plain read: {best['% of reading']:.0f} % ({best['variant']}, N = {best['N']})"
    return _by_tokens(
        where(table, variant=ROUTED), y="us", series="variant", logy=True, ylabel="µs (log)",
        title="Routed experts: rows found in the kernel beat copied rows", said=said,
        alt="Lines of the time of a routed layer against tokens, by kernel.",
        caption="Q4_K, every expert on the GPU, synthetic uniform routing; from the chosen experts to the weighted sum."
        if set(table["format"]) == {"Q4_K"}
        else "Every expert on the GPU, synthetic uniform routing; from the chosen experts to the weighted sum.",
        table=table, hidden=["role", "model", "trace"],
    )  # fmt: skip


def routed_integers(rows: pd.DataFrame) -> dict[str, str]:
    """What leaving the experts' weights integers is worth, by tokens, and what it reaches of the read."""
    both = variants.INDEXED_MATRIX, variants.INDEXED_INTEGERS
    table = tables.compared(rows, "routed", both[1], both[0])
    times = tables.times(rows, "routed").set_index(["format", "N", "variant"])["% of reading"] if len(table) else {}
    found = {}
    for _, line in table.iterrows():
        before, now = (times[line["format"], line["N"], name] for name in both)
        said = f"{words.faster(line['ratio'])}, {before:.0f} → {now:.0f} % of a plain read"
        found[f"{line['format']}, {words.tokens(line['N'])}"] = said
    return found


def hit_rates(
    traces: Sequence[str] = tuple(variants.TRACES), policies: Sequence[str] = tuple(cache.POLICIES),
    capacities: Sequence[int] = (16, 64, 128, 256), tokens: int = 1, length: int = 256,
) -> Drawing:  # fmt: skip
    """Hit rate against capacity by policy, of synthetic traces; counted, not measured."""
    table = tables.hit_rates(traces, policies, capacities, tokens, length)
    least = table[table["capacity"] == table["capacity"].min()]
    said = "; ".join(
        f"{trace} {part['hit rate'].max():.0%} ({part.loc[part['hit rate'].idxmax(), 'policy']})"
        for trace, part in least[least["policy"] != "belady"].groupby("trace", sort=False)
    )
    return drawing(
        plots.lines, table, "capacity", "hit rate", "policy", panel="trace", logx=True,
        xlabel="experts a layer in the cache", ylabel="hit rate",
        title=f"Synthetic traces, {words.tokens(tokens)} at a time",
        alt=f"Lines of hit rate against capacity, by policy and trace. {said}.",
        caption=f"Best policy with {table['capacity'].min()} experts a layer: {said}. belady is the oracle.",
    )  # fmt: skip


@view(tables.cached, "no steps through the cache were measured.")
def stall(table: pd.DataFrame) -> Drawing:
    """µs that a step waits for experts, against capacity, by trace, of the fewest tokens; the table has all."""
    ways = {"stall, when needed": "copied when needed", "stall, prefetched": "prefetched"}
    few = where(table, N=table["N"].min()).rename(columns=ways)
    tidy = few.melt(["trace", "policy", "N", "capacity"], list(ways.values()), var_name="way", value_name="stall")
    waits = table["stall, when needed"]
    return drawing(
        plots.lines, tidy.assign(stall=tidy["stall"].clip(lower=1)), "capacity", "stall", "way", panel="trace",
        logx=True, logy=True, xlabel="experts a layer in the cache", ylabel="µs a step waits (log)",
        title="Waiting for experts that are not in the cache",
        alt="Lines of the time a step waits against capacity, with and without prefetch, by trace.",
        caption=f"{variants.LAYERS} layers, {words.tokens(few['N'].iloc[0])} a step, beyond the same step with every "
        "expert there. Synthetic traces; the table has more tokens.",
        said=f"Copied when needed, a step waits {waits.min():.0f} to {waits.max():.0f} µs",
        table=table, hidden=["model", "format"],
    )  # fmt: skip


def cache_costs(rows: pd.DataFrame) -> dict[str, str]:
    """The slowest step through a small cache, over one with every expert there."""
    table = tables.cached(rows)
    if table.empty:
        return {}
    slower = table["when needed µs"] / table["compute µs"]
    worst = table.loc[slower.idxmax()]
    ledger.note("thrash", {"slower": slower.max()})
    place = f"{worst['trace']}, {words.tokens(worst['N'])}, {worst['capacity']} experts a layer"
    return {"Slowest step with an expert cache, against every expert there": f"{slower.max():.1f}× slower ({place})"}


def overlap(rows: pd.DataFrame) -> dict[str, str]:
    """Does prefetch hide the copies where they and the compute are about as long? And when nothing hits?"""
    table = tables.cached(rows)
    if table.empty:
        return {}
    some, idle, none = where(table, balanced=True), table[table["hit rate"] == 1]["copies µs"], table["hit rate"] == 0
    ledger.note("none", {"hit nothing": int(none.sum()), "cases": len(table)})
    found = {"Cases in which copies and compute are within a factor of 2": f"{len(some)} of {len(table)}"}
    for n, part in some.groupby("N"):
        key = f"There, time with prefetch over the longer of the two, {words.tokens(n)}"
        found[key] = words.span(part["prefetched / larger"])
    found["Cases in which no expert is found in the cache"] = f"{none.sum()} of {len(table)}"
    if len(idle):
        found["Host's time a step to find that every expert is there"] = f"{words.span(idle, '{:.0f}')} µs"
    return found


def summary(rows: pd.DataFrame) -> dict[str, str]:
    """How much faster than bf16 cuBLAS, by tokens: one family of bits; and the fastest in each case."""
    table, found = _beside_cublas(rows), {}
    for n, part in table.groupby("N"):
        alone, mixed = (words.faster(geometric_mean(part[name])) for name in ("ratio", "mixed ratio"))
        found[words.tokens(n)] = f"{alone}; the fastest kernel in each case {mixed}"
    return found


ledger.watch(__name__)
