"""Figures and sentences of the study, each made from the rows of one GPU (or from none, where nothing is measured)."""

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
from labkit.studies.batched_ffn import tables, variants

SHOWN = (variants.PER_TOKEN, variants.GEMM_N, variants.STATIONARY, variants.MATRIX, variants.INTEGERS, variants.WIDE)
SHOWN += (variants.CUBLAS, variants.GEMLITE)
UNITS = {"us": "µs", "us a token": "µs a token", "against us": "library µs"}
BARS = {  # format -> percent of the plain read, for the multiply-add family up to 2 tokens, and for the other up to 8
    "BF16": 80, "Q8_0": 80, "Q4_K": 80, "Q5_K": 70, "Q6_K": 70,
}  # fmt: skip
ROWS = 17408  # of the product whose times are drawn

_by_tokens = partial(drawing, plots.lines, x="N", logx=True, xlabel="tokens", units=UNITS)
_products = partial(tables.times, op="product")
_beside_cublas = partial(tables.beside, op="product", against=variants.CUBLAS)
ALONE = tables.ALONE["product"]


@view(lambda rows: where(_products(rows), rows=ROWS, variant=SHOWN), f"no product of {ROWS} rows was measured.")
def time_per_token(table: pd.DataFrame) -> Drawing:
    """µs a token against the number of tokens, by variant and format, of one shape."""
    return _by_tokens(
        table, y="us a token", series="variant", panel="format", logy=True, ylabel="µs a token (log)",
        title=f"One product, {ROWS} × {table['K'].iloc[0]}", caption="Cold weights, CUDA graph.",
        alt="Lines of µs a token against tokens, by variant and format.",
        said="; ".join(_fastest(part, format) for format, part in table.groupby("format", sort=False)),
        hidden=["rows", "K", "role", "MB"],
    )  # fmt: skip


def _fastest(table: pd.DataFrame, format: str) -> str:
    """Which variant is the fastest at the least and at the largest number of tokens."""
    parts = []
    for n in (table["N"].min(), table["N"].max()):
        some = table[table["N"] == n]
        parts.append(f"{some.loc[some['us'].idxmin(), 'variant']} at {n}")
    return f"{format}: fastest {', '.join(dict.fromkeys(parts))}"


def read_percent(rows: pd.DataFrame, variant: str = variants.MATRIX) -> Drawing:
    """Percent of a plain cold read of the same stored bytes, by format and tokens; said: of all shapes at least N."""
    table = where(_products(rows), variant=variant).dropna(subset="% of reading")
    if table.empty:
        return f"{variant} was not measured beside a plain read."
    least = table[table["N"] == table.groupby("format")["N"].transform("min")]
    said = "; ".join(
        f"{format} {words.span(part['% of reading'], '{:.0f}')} % at N = {part['N'].iloc[0]}"
        for format, part in least.groupby("format", sort=False)
    )
    return _by_tokens(
        table.assign(shape=_shapes(table)), y="% of reading", series="format", panel="shape",
        reference=[(100, variants.READ)], ylabel="% of a plain read", said=said,
        title=f"{variant}: how near to reading the weights",
        alt="Lines of percent of a plain read against tokens, by format and shape.",
        caption="A plain cold read of as many bytes, in the same blocks, is 100 %.",
        table=["shape", "format", "N", "us", "% of reading"],
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
    mean = table.groupby("N")["ratio"].agg(geometric_mean)
    said, noise = ", ".join(f"×{value:.2f} at N = {n}" for n, value in mean.items()), table["noise"].max()
    return _by_tokens(
        table.assign(where=_shapes(table)), y="ratio", series="format", panel="where", reference=[(1, "as fast")],
        ylabel="time of weights / time of integers", title="Integers into matrix instructions",
        alt=f"Lines of the gain of integers over weights against tokens, by format and shape. Means: {said}.",
        caption=f"Above 1: integers are faster. Geometric means: {said}. A/A noise: at most {noise:.1%}.",
        hidden=["where", "no slower"],
    )  # fmt: skip


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


@view(_beside_cublas, "nothing could be compared with cuBLAS.")
def losses(table: pd.DataFrame) -> str:
    """The cases in which a library is the faster one."""
    slower, other = table[table["verdict"] == "slower"], (table["mixed verdict"] == "slower").sum()
    mixed = f"with the fastest of the lab's variants in each case, in {other} ({tables.MIXED})."
    if slower.empty:
        return f"in none of {len(table)} cases is bf16 cuBLAS clearly faster than {ALONE}; {mixed}"
    ledger.note("slower", slower)
    parts = [
        f"{format} in {len(part)}, the least N = {part['N'].min()} (at most {words.faster(1 / part['ratio'].min())})"
        for format, part in slower.groupby("format", sort=False)
    ]
    return f"bf16 cuBLAS is faster than {ALONE} in {len(slower)} of {len(table)} cases: {', '.join(parts)}; {mixed}"


@view(tables.gains, "the loop, one launch, and weights read once were not timed beside each other.")
def gains(table: pd.DataFrame) -> Drawing:
    """What one launch is worth, and what reading the weights once, against the number of tokens."""
    mean = table.groupby(["step", "format", "N"], sort=False)["ratio"].agg(geometric_mean).reset_index()
    said = "; ".join(
        f"{step} ×{geometric_mean(part[part['N'] == part['N'].max()]['ratio']):.2f} at N = {part['N'].max()}"
        for step, part in mean.groupby("step", sort=False)
    )
    return _by_tokens(
        mean, y="ratio", series="step", panel="format", logy=True, reference=[(1, "no gain")],
        ylabel="time before / time after (log)", title="Fewer launches, then fewer bytes",
        alt=f"Lines of the gain of each change against tokens, by format. Geometric means: {said}.",
        caption=f"In a CUDA graph, so that a launch costs the GPU alone. Geometric means: {said}.",
        table=table, hidden=["no slower"],
    )  # fmt: skip


def launches(rows: pd.DataFrame) -> pd.DataFrame:
    """Launches and how often all weights are asked for, by tokens."""
    table = _products(rows).dropna(subset=["launches", "passes"]).drop_duplicates(["variant", "N"])
    table = table.assign(text=[f"{n:.0f}, {p:.0f}" for n, p in zip(table["launches"], table["passes"], strict=True)])
    return table.pivot(index="N", columns="variant", values="text").fillna("").reset_index()


def arithmetic(rows: pd.DataFrame) -> pd.DataFrame:
    """What arithmetic allows the multiply-add family at most, at one shape."""
    table = tables.arithmetic(rows)
    first = table[table["rows"].isin(table["rows"].head(1)) & (table["N"] <= 8)]
    return first.drop(columns=["rows", "K"]).rename(columns=UNITS)


def bars(rows: pd.DataFrame) -> str:
    """Which cases of few tokens are below the part of the plain read that was aimed at, by family of bits."""
    table = where(_products(rows), format=list(BARS)).dropna(subset="% of reading")
    families = {variants.STATIONARY: 2, variants.MATRIX: 8, variants.INTEGERS: 8}
    parts = [table[(table["variant"] == name) & (table["N"] <= n)] for name, n in families.items()]
    if not any(map(len, parts)):
        return "no case of few tokens was measured beside a plain read."
    said = [_below(part, n) for part, n in zip(parts, families.values(), strict=True) if len(part)]
    return f"below the part of a plain read that was aimed at: {'; '.join(said)}."


def _below(table: pd.DataFrame, most: int) -> str:
    """How many of one family's cases do not reach their bar, and the worst of them."""
    below = table[table["% of reading"] < table["format"].map(BARS)]
    ledger.note("below", {"cases": len(table), "below": len(below)})
    said = f"{len(below)} of {len(table)} cases of {table['variant'].iloc[0]} up to {most} tokens"
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
    place = table["model"] if "model" in table else _shapes(table)
    return _by_tokens(
        table.assign(where=place), y="ratio", series="format", panel="where", logy=True, reference=[(1, "as fast")],
        ylabel="time library / time ours (log)", title=f"Against {against} (above 1: {alone} faster)",
        said=f"{alone} is {_counted(table)}",
        alt=f"Lines of the time of {against} over that of {alone}, by shape, format and tokens.",
        caption=f"One family of bits at every N. The fastest of the lab's variants in each case instead "
        f"({tables.MIXED}): {_counted(table, 'mixed ')}.",
        hidden=["where", "no slower"],
    )  # fmt: skip


def _counted(table: pd.DataFrame, mixed: str = "") -> str:
    """In how many cases it is faster, and the mean. mixed: begins the columns of the fastest variant's."""
    mean = geometric_mean(table[f"{mixed}ratio"])
    return f"{counted(table[f'{mixed}verdict'])} of {len(table)} cases, geometric mean {mean:.2f}"


dequantised = partial(against_cublas, against=variants.DEQUANTISED)  # the weak rival: in every call
layers = partial(against_cublas, op="ffn")
grouped_mm = partial(against_cublas, op="routed", against=variants.GROUPED_MM)


@view(tables.price, "no product was measured.")
def price(table: pd.DataFrame) -> str:
    """What the same bits in every batch cost, against the fastest of all."""
    worst, mixed = table.loc[table["price"].idxmax()], table["mixed price"]
    return (
        f"{ALONE}, one family of bits, is the fastest of all in {(table['price'] == 1).sum()} of {len(table)} cases; "
        f"on average it takes ×{geometric_mean(table['price']):.2f} of the fastest's time, at most "
        f"×{worst['price']:.2f} ({worst['format']}, {worst['rows']} × {worst['K']}, N = {worst['N']}, against "
        f"{worst['fastest']}). The "
        f"fastest of the lab's variants in each case takes ×{geometric_mean(mixed):.2f}, at most ×{mixed.max():.2f}, "
        f"but {tables.MIXED}."
    )


def _same(table: pd.DataFrame) -> str:
    ledger.note("same", table[["same", "cases"]].sum().to_dict())
    return f"{table['same'].sum()} of {table['cases'].sum()}"


@view(tables.bits, "no token of a batch was looked at alone.")
def bits(table: pd.DataFrame) -> str:
    """In how many cases a token alone has the bits of its batch: of ours, libraries, and sums by atomics."""
    ours, libraries = (table[table["who"] == who] for who in (tables.OWN, tables.LIBRARY))
    atomics = table[table["variant"] == variants.SPLIT_K]
    parts = [
        f"{_same(part)} cases and variants of {who}" for who, part in (("ours", ours), ("libraries", libraries))
        if len(part)
    ]  # fmt: skip
    parts += [f"{_same(atomics)} of the control that sums by atomics"] if len(atomics) else []
    return f"a token alone has the bits of its batch in {', '.join(parts)}."


@view(tables.gemlite, "gemlite was not timed beside the lab's variants: it is an optional library.")
def gemlite(table: pd.DataFrame) -> str:
    """gemlite and ours, each over the floor of its own bytes."""
    parts = [
        f"{format} ×{geometric_mean(part):.2f} (from ×{part.min():.2f} to ×{part.max():.2f})"
        for format, part in table.groupby("format", sort=False)["better"]
    ]
    return (
        f"time over the floor of its own bytes, gemlite's over that of {ALONE}, geometric mean of {len(table)} cases "
        f"×{geometric_mean(table['better']):.2f}: {'; '.join(parts)}. Over the fastest of the lab's variants in each "
        f"case ×{geometric_mean(table['mixed better']):.2f}, but {tables.MIXED}."
    )


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
    said = "no plain read beside"
    indexed = (variants.INDEXED, variants.INDEXED_MATRIX, variants.INDEXED_INTEGERS)
    near = where(table, variant=indexed).dropna(subset="% of reading")
    if len(near):
        best = near.loc[near["% of reading"].idxmax()]
        said = f"nearest to reading the distinct experts: {best['% of reading']:.0f} % ({best['variant']}, "
        said += f"{best['format']}, N = {best['N']})"
    return _by_tokens(
        table, y="us", series="variant", panel="format", logy=True, ylabel="µs (log)",
        title="Routed experts, all on the GPU", said=said,
        alt="Lines of time of a routed layer against tokens, by variant.",
        caption="From the chosen experts to the weighted sum, uniform synthetic routing.",
        hidden=["role", "model", "trace"],
    )  # fmt: skip


def routed_integers(rows: pd.DataFrame) -> str:
    """What leaving the experts' weights integers is worth, by tokens, and what it reaches of the read."""
    both = variants.INDEXED_MATRIX, variants.INDEXED_INTEGERS
    table = tables.compared(rows, "routed", both[1], both[0])
    if table.empty:
        return "routed experts by integers were not timed beside those by weights."
    times = tables.times(rows, "routed").set_index(["format", "N", "variant"])["% of reading"]
    parts = []
    for _, line in table.iterrows():
        before, now = (times[line["format"], line["N"], name] for name in both)
        said = f"{line['format']}, N = {line['N']}: {words.interval(line)}"
        parts.append(f"{said}, {before:.0f} → {now:.0f} % of the read")
    return f"time by weights / time by integers: {'; '.join(parts)}. A/A noise: at most {table['noise'].max():.1%}."


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
    """µs that a step waits for experts, against capacity, by trace and tokens."""
    ways = {"stall, when needed": "copied when needed", "stall, prefetched": "prefetched"}
    tidy = table.rename(columns=ways).melt(
        ["trace", "policy", "N", "capacity"], list(ways.values()), var_name="way", value_name="stall"
    )
    tidy = tidy.assign(panel=tidy["trace"] + ", N = " + tidy["N"].astype(str), stall=tidy["stall"].clip(lower=1))
    several = tidy.groupby("panel")["capacity"].transform("nunique") > 1
    waits = table["stall, when needed"]
    said = " to ".join(
        f"{end['stall, when needed']:.0f} µs ({end['trace']}, N = {end['N']}, {end['capacity']} experts)"
        for end in (table.loc[waits.idxmin()], table.loc[waits.idxmax()])
    )
    return drawing(
        plots.lines, tidy[several] if several.any() else tidy, "capacity", "stall", "way", panel="panel", logx=True,
        logy=True, xlabel="experts a layer in the cache", ylabel="µs a step waits (log)",
        title=f"Waiting for experts, {variants.LAYERS} layers",
        alt=f"Lines of the time a step waits against capacity, with and without prefetch. When needed: from {said}.",
        caption=f"Beyond the same step with every expert there. Copied when needed: from {said}. Synthetic traces.",
        table=table, hidden=["model", "format"],
    )  # fmt: skip


@view(tables.cached, "no steps through the cache were measured.")
def thrash(table: pd.DataFrame) -> str:
    """When a small cache is no better than none: steps that go past it."""
    table = table.assign(slower=table["when needed µs"] / table["compute µs"])
    none = table[table["hit rate"] == 0]
    worst = table.loc[table["slower"].idxmax()]
    ledger.note("thrash", {"hit nothing": len(none), "slower": worst["slower"]})
    return (
        f"{len(none)} of {len(table)} cases hit nothing; the slowest step takes ×{worst['slower']:.1f} of one with "
        f"every expert there (N = {worst['N']}, {worst['trace']}, {worst['policy']}, {worst['capacity']} experts a "
        f"layer)."
    )


@view(tables.cached, "no steps through the cache were measured.")
def overlap(table: pd.DataFrame) -> str:
    """Does prefetch hide the copies where they and the compute are about as long?"""
    some = where(table, balanced=True)
    if some.empty:
        return "in no case are copies and compute within 2× of each other."
    said = ", ".join(
        f"{words.span(part['prefetched / larger'], '×{:.2f}')} "
        f"(N = {n}, {part['compute µs'].min():.0f} µs of compute and more)"
        for n, part in some.groupby("N")
    )
    idle = table[table["hit rate"] == 1]["copies µs"]
    host = f" Where nothing is to be copied, the host takes {idle.min():.0f} to {idle.max():.0f} µs a step to find out."
    return (
        f"in {len(some)} cases copies and compute are within 2× of each other; with prefetch a step takes, of the "
        f"larger of the two, {said}.{host if len(idle) else ''}"
    )


@view(_beside_cublas, "nothing could be compared with cuBLAS.")
def summary(table: pd.DataFrame) -> str:
    """The result in one sentence, of one family of bits; in another, what following the fastest variant would give."""
    return (
        f"against bf16 cuBLAS, {ALONE}, one family of bits at every number of tokens, is "
        f"{counted(table['verdict'])} of {len(table)} cases; geometric means over formats and shapes: "
        f"{_means(table, 'ratio')}. The fastest of the lab's variants in each case would be "
        f"{counted(table['mixed verdict'])}, with {_means(table, 'mixed ratio')}, but {tables.MIXED}."
    )


def _means(table: pd.DataFrame, column: str) -> str:
    parts = [
        f"N = {n} ×{geometric_mean(part[column]):.2f}" for n, part in table.groupby("N") if n in (1, 8, 32, 64, 512)
    ]
    return ", ".join(parts) or "other N only"


ledger.watch(__name__)
