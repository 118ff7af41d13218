"""Figures, tables and sentences of the page, each made from the rows of one GPU."""

from collections.abc import Sequence

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster, filled, number, span, spans
from labkit.studies.gated_delta_today import study, tables, variants
from labkit.studies.gated_delta_today.claims import CONTEXT, FULL

INTERVAL = ["ratio", "low", "high"]
JUDGED = [*INTERVAL, "noise", "verdict"]
WHOLE = (512,)  # sequences of the whole steps that are shown
FLOOR = "least, by bytes"
ENDS = (variants.DRIFT_LENGTHS[0], variants.DRIFT_LENGTHS[-1])  # L of the errors that are said
NAMES = {"sglang 0.5.23": "SGLang", "fla": "fla-core", "flashinfer": "FlashInfer", "ours": "this lab"}
COUNTED = (variants.OURS, variants.PLAIN, variants.OURS_STORED, variants.FUSED, variants.SEGMENTS, variants.ONE_SEGMENT)
SHOWN = (variants.PLAIN, variants.OURS, variants.SGLANG_PLAIN, variants.SGLANG_RING)


def named(variant: str) -> str:
    """A variant as the page shows it: "SGLang, ring"."""
    head, comma, rest = variant.partition(",")
    return NAMES.get(head, head) + comma + rest


def kept(table: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `kept`: gate and type of the state, "GDN, fp32 state"."""
    return table.assign(kept=table["gate"] + ", " + table["state"] + " state")


def length_time(rows: pd.DataFrame) -> Drawing:
    """Time of a decode step against L, with the floor, and the fastest L marked."""
    table = tables.lengths(rows)
    if table.empty:
        return "rings of different lengths were not timed beside each other."
    best = tables.best_lengths(rows)
    marked = table.loc[table.groupby(["gate", "state", "whose"], sort=False)["us"].idxmin()]
    floors = table.drop_duplicates(["gate", "state", "L"]).assign(whose=FLOOR)
    floors = floors.assign(us=floors["floor us"]).dropna(subset=["us"])
    drawn = pd.concat([table, floors, marked.assign(whose=marked["whose"] + ", fastest")], ignore_index=True)
    drawn = kept(drawn).assign(whose=drawn["whose"].map(named), state=drawn["state"] + " state")
    gate = "GDN" if "GDN" in set(drawn["gate"]) else drawn["gate"].iloc[0]
    ends = filled(
        where(best.assign(whose=best["whose"].map(named)), gate=gate), "{whose} {state} {fastest L} ({predicted L:.0f})"
    )
    return drawing(
        plots.lines, where(drawn, gate=gate), "L", "us", "whose",
        panel="state", logx=True, ylabel="µs",
        xlabel="L, tokens between two writes of a state", title="How seldom a state should be written",
        alt="Lines of time against L, by whose kernel, with the least time by bytes.",
        caption="Batch 256, GDN (KDA in the table), each L with its fastest launch. Least: the bytes of each L at the "
        "rate of a plain read of the states in the same run.",
        said=f"Fastest L (in brackets that of the least bytes): {', '.join(ends)}" if ends else "",
        table=drawn[["kept", "whose", "L", "us", "percent"]],
        units={"kept": "case", "us": "µs", "percent": "% of the floor"},
    )  # fmt: skip


def lengths_answered(rows: pd.DataFrame) -> dict[str, str]:
    """Of each kernel at batch 256: the L of the least bytes, the fastest L, and what 16 loses by it."""
    said = {}
    for line in tables.best_lengths(rows).to_dict("records"):
        name = f"{named(line['whose'])}, {line['gate']}, {line['state']} state"
        usual = f"L = {variants.LENGTH}"
        lost = "" if line["fastest L"] == variants.LENGTH else f", {faster(line['ratio'], usual)}"
        ledger.note("lengths", line)
        said[name] = f"predicted {line['predicted L']:.0f}, fastest {line['fastest L']}{lost}"
    return said


def batch_time(rows: pd.DataFrame) -> Drawing:
    """Time of a decode step against batch: written at every token and once in L, SGLang's and ours, and the floor."""
    table = tables.times(rows, "ring")
    if table.empty:
        return "no decode on a ring was timed."
    shown = where(table, gate="GDN", state=variants.STATES)
    lines = where(shown, variant=SHOWN)
    floors = where(shown, variant=variants.OURS).assign(variant=FLOOR)
    floors = floors.assign(us=floors["floor us"]).dropna(subset=["us"])
    drawn = pd.concat([lines, floors], ignore_index=True)
    drawn = drawn.assign(variant=drawn["variant"].map(named), state=drawn["state"] + " state")
    return drawing(
        plots.lines, drawn, "batch", "us", "variant", panel="state", logx=True, logy=True, xlabel="batch", ylabel="µs",
        title="Decode that writes its state at every token, and once in L",
        alt="Lines of time against batch, by kernel.",
        caption="GDN, L = 16, sequences at every position of their rings, slots at random. Least: its bytes at the "
        "rate of a plain read of the states in the same run.",
        said=". ".join(crossovers(rows)),
        table=["state", "batch", "variant", "us", "percent"], units={"us": "µs", "percent": "% of the floor"},
    )  # fmt: skip


def crossovers(rows: pd.DataFrame) -> list[str]:
    """From which batch on a ring pays: "this lab's, fp32: from batch 4 on"."""
    table = tables.crossover(rows).replace({"whose": {"ours": "this lab's"}})
    said = filled(
        table.dropna(subset=["batch"]), "{whose} ring is faster with {state} states from batch {batch:.0f} on"
    )
    return said + [
        f"{line['whose']} ring is faster with {line['state']} states at no batch"
        for line in table[table["batch"].isna()].to_dict("records")
    ]


def rings(rows: pd.DataFrame) -> Drawing:
    """SGLang's decode on a ring over ours, each at its best, by batch."""
    table = tables.rings(rows)
    if table.empty:
        return "no decode on a ring was timed beside SGLang's (`labkit fetch sglang`)."
    drawn = kept(table).assign(row="batch " + table["batch"].astype(str))
    mean = geometric_mean(table["ratio"])
    ledger.note("rings", {"mean": max(mean, 1 / mean)})
    return drawing(
        plots.ratios, drawn, "row", *INTERVAL, group="gate", panel="state", verdict="verdict",
        hidden=("kept", "row", "runs"), xlabel="× faster than SGLang's ring",
        title="Decode on a ring against SGLang's, each at its best",
        alt="Ratios of the time of SGLang's decode on a ring to this lab's, by gate, state and batch.",
        caption="Both sides with the fastest of their launches and of five L.",
        said=f"This lab's is {counted(table['verdict'])} of {len(table)} cases, {faster(mean)} in their mean",
    )  # fmt: skip


def floors(rows: pd.DataFrame) -> dict[str, str]:
    """Percent of the floor with the GPU full, of ours and SGLang's, and what the rule loses against a search."""
    table, said = tables.times(rows, "ring"), {}
    for name in (variants.OURS, variants.SEARCHED, variants.SGLANG_SEARCHED):
        some = tables.full(where(table, gate="GDN", variant=name), FULL)
        for state, part in some.dropna(subset=["percent"]).groupby("state", sort=False) if len(some) else ():
            said[f"{named(name)}, GDN, {state} state, batch {FULL} and more"] = (
                f"{span(part['percent'], '{:.0f}')} % of the floor"
            )
    ruled = tables.compared(rows, "ring", variants.OURS, variants.SEARCHED)
    if len(ruled):
        said["time with the fastest choice ÷ time by the rule"] = span(ruled["ratio"])
    plain = tables.compared(rows, "ring", variants.OURS, variants.PLAIN)
    if len(plain):
        said["ring by the rule against writing always"] = f"{counted(plain['verdict'])} of {len(plain)} cases"
    return said


def verifies(rows: pd.DataFrame) -> Drawing:
    """Time of a verify that stores states over that of one on the ring."""
    table = tables.verifies(rows).dropna(subset=["ratio"])
    if table.empty:
        return "no verify on the ring was timed."
    shown = table.assign(
        row=table["draft"] + ", T = " + table["T"].astype(str) + ", batch " + table["batch"].astype(str),
        whose=table["whose"].str.replace("ours", "this lab").str.replace("SGLang's", "SGLang"),
        state=table["state"] + " state",
    )
    drawn = shown[~shown["whose"].str.endswith("writes")]
    return drawing(
        plots.ratios, drawn, "row", *INTERVAL, group="whose", panel="state", verdict="verdict",
        hidden=("row", "runs"), xlabel="× faster than with stored states",
        title="Drafts in the ring against a stored state per draft",
        alt="Ratios of the time of a verify that stores states to one in the ring, by whose, drafts and batch.",
        caption="Sequences have 0, T, 2 T … entries in rings of 16. With its writes: the states of those whose ring is "
        "full are written first, as if all drafts were accepted.",
        said=f"Times faster: {'; '.join(spans(shown, 'whose', 'ratio'))}",
        table=shown[["whose", "state", "batch", "draft", "T", "us", "against us", *JUDGED]],
        units={"us": "ring µs", "against us": "stored µs"},
    )  # fmt: skip


def verified(rows: pd.DataFrame) -> dict[str, str]:
    """How much faster a verify on the ring is than one that stores states, by whose and type of the state; and
    how much faster ours is than SGLang's."""
    rivals = tables.rival_drafts(rows).assign(whose="ours, than SGLang's")
    parts = [tables.verifies(rows).dropna(subset=["ratio"]), rivals]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    said = {
        "ours": "this lab",
        "SGLang's": "SGLang's",
        "ours, one at a time": "this lab, one draft at a time",
        "ours, than SGLang's": "this lab, than SGLang's on the ring",
    }
    return {
        f"{said[whose]}, {state} state": f"{span(part['ratio'])}×; {counted(part['verdict'])}"
        for (whose, state), part in (table.groupby(["whose", "state"], sort=False) if len(table) else ())
        if whose in said
    }


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """[K, V] over [V, K] where some tokens write the state and where none does."""
    table = tables.layouts(rows).dropna(subset=["ratio"])
    return table[["kernel", "state", "batch", "writes", *JUDGED]]


def prompt_time(rows: pd.DataFrame) -> Drawing:
    """Time of one long prompt against its length, by heads."""
    table = tables.prefill_times(rows)
    table = table[table["prefill"].str.startswith("1 x ")] if len(table) else table
    if table.empty:
        return "no long prompt was timed."
    shown = (variants.FLA, variants.FLASHINFER, variants.FUSED, variants.SEGMENTS, variants.ONE_SEGMENT)
    drawn = where(table, variant=shown)
    drawn = drawn.assign(heads=_heads(drawn), variant=drawn["variant"].map(named))
    return drawing(
        plots.lines, drawn, "tokens", "us", "variant", panel="heads", logx=True, logy=True,
        xlabel="tokens of the prompt", ylabel="µs", title="One long prompt",
        alt="Lines of time against the tokens of a prompt, by library and number of heads.",
        caption="GDN, K = V = 128. Segments: as many as the rule chooses, in the table beneath.",
        said=_segments(table),
        table=["heads", "prefill", "variant", "us", "segments"], units={"us": "µs", "prefill": "prompts"},
    )  # fmt: skip


def _heads(table: pd.DataFrame) -> pd.Series:
    return table["H"].astype(str) + " / " + table["HV"].astype(str) + " heads"


def _segments(table: pd.DataFrame) -> str:
    """How many segments the rule chooses: "Segments: 1 to 32"."""
    some = where(table, variant=variants.FUSED)["segments"].dropna()
    return f"Segments: {span(some, '{:.0f}')}" if len(some) else ""


def prompts(rows: pd.DataFrame) -> Drawing:
    """The faster of fla-core and FlashInfer over ours, fused, every prompt."""
    table = tables.prefills(rows)
    table = table[table["beside"].notna()]
    if table.empty:
        return "no prompt was timed beside fla-core or FlashInfer: `pip install labkit[peers]`, `labkit fetch`."
    drawn = table.assign(heads=_heads(table), library=table["against"].map(named)).drop(columns=["variant", "against"])
    mean = geometric_mean(table["ratio"])
    ledger.note("prompts", {"mean": max(mean, 1 / mean)})
    return drawing(
        plots.ratios, drawn, "prefill", *INTERVAL, group="heads", verdict="verdict",
        hidden=("H", "HV", "tokens", "beside", "runs"), xlabel="× faster than the faster library",
        title="The fused prefill against the faster of fla-core and FlashInfer",
        alt="Ratios of the faster library's time to that of this lab's extend, by heads and prompts.",
        caption="The table beneath names the library.",
        said=f"This lab's is {counted(table['verdict'])} of {len(table)} cases, {faster(mean)} in their mean",
        units={"prefill": "prompts", "us": "this lab µs", "against us": "library µs"},
    )  # fmt: skip


def libraries(rows: pd.DataFrame) -> pd.DataFrame:
    """fla's time over FlashInfer's, and what segments and fusing gain ours: where each gain ends."""
    table = tables.prefills(rows)
    table = table[table["beside"].isna()]
    table = table.assign(heads=_heads(table), faster=table["variant"].map(named), than=table["against"].map(named))
    return table[["heads", "prefill", "faster", "than", *JUDGED]].rename(columns={"prefill": "prompts"})


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of prompts' outputs against float64, and what leaving out a segment's map would make of it."""
    table = tables.prefill_errors(rows)
    table = table.assign(heads=_heads(table), variant=table["variant"].map(named))
    return table[["heads", "prefill", "variant", "segments", "error", "a map left out"]].rename(
        columns={"prefill": "prompts"}
    )


def drift(rows: pd.DataFrame) -> Drawing:
    """Error of the state along many tokens, by L and type of the state."""
    table = tables.drift(rows)
    if table.empty:
        return "errors along many tokens were not recorded."
    drawn = kept(table).assign(L="L = " + table["L"].astype(str))
    last = table[table["tokens"] == table["tokens"].max()]
    short = tables.read_short(rows)
    control = f"A ring read one entry short: {span(short['one entry short'], '{:.2f}')}" if len(short) else ""
    return drawing(
        plots.lines, drawn, "tokens", "state error", "L", panel="kept", logx=True, logy=True, xlabel="tokens",
        ylabel="relative error of the state", title="Does the error grow?",
        alt="Lines of the relative error of the state against tokens, by L.",
        caption="One sequence, against float64; with L = 1 the state is written, and rounded, at every token.",
        said=". ".join(filter(None, [_at_the_end(last), _narrow(rows), control])),
        table=["kept", "L", "tokens", "output error", "state error"], units={"kept": "case"},
    )  # fmt: skip


def _at_the_end(last: pd.DataFrame) -> str:
    """What a ring does to the error of a GDN state: "bf16 0.013 and 0.0031"; last: the lines of the last token."""
    said = []
    for state, part in where(last, gate="GDN").groupby("state", sort=False):
        ends = [part[part["L"] == length]["state error"] for length in ENDS]
        if all(map(len, ends)):
            said.append(f"{state} {' and '.join(number(float(one.iloc[0]), '{:.2g}') for one in ends)}")
    after = f"Error of a GDN state after {last['tokens'].max()} tokens, with L = {' and '.join(map(str, ENDS))}"
    return f"{after}: {', '.join(said)}" if said else ""


def _narrow(rows: pd.DataFrame) -> str:
    """What a ring does to the time of decode with states of few bits: "With fp8 states a ring is 2.73× slower"."""
    table = tables.compared(rows, "ring", variants.OURS, variants.PLAIN, gate="GDN")
    said = [
        f"{faster(line['ratio'])} with {line['state']} states (batch {line['batch']})"
        for line in where(table, state=variants.NARROW).to_dict("records")
    ]
    return f"Beside writing at every token, a ring of {variants.LENGTH} is {', '.join(said)}" if said else ""


def whole(rows: pd.DataFrame) -> dict[str, str]:
    """What a whole step, a whole verify of a chain, and a first token of Qwen3.5-4B can gain at most."""
    pair = {
        "SGLang's ring": ("ring", variants.SGLANG_RING, variants.SGLANG_PLAIN),
        "this lab's ring": ("ring", variants.OURS, variants.PLAIN),
        "SGLang's drafts": ("ring_verify", variants.SGLANG_RING, variants.SGLANG_STORED),
        "this lab's drafts": ("ring_verify", variants.OURS, variants.OURS_STORED),
    }
    said = {}
    for name, (op, variant, against) in pair.items():
        table = where(tables.whole_steps(rows, op, variant, against, CONTEXT), batch=WHOLE)
        table = where(table, draft="chain", T=4) if op == "ring_verify" else table
        for line in table.to_dict("records"):
            ledger.note("whole", line)
            drafts = f", T = {line['T']}" if op == "ring_verify" else ""
            said[f"{name}, batch {line['batch']}{drafts}"] = faster(line["ratio"])
    for line in where(tables.first_token(rows), prefill="1 x 8192").to_dict("records"):
        ledger.note("first_token", line)
        said[f"first token, {line['prefill']}, {named(line['variant'])} for fla-core"] = faster(line["ratio"])
    return said


def searched(rows: pd.DataFrame) -> pd.DataFrame:
    """What the searches chose, case by case."""
    table = tables.searched(rows)
    return table.assign(variant=table["variant"].map(named))


def predicted(gates: Sequence[str], states: Sequence[str]) -> pd.DataFrame:
    """The best L by bytes alone, at the batch at which every L is timed."""
    wide = [state for state in states if state in variants.STATES]
    found = [study.shape(gate) | {"state": state, "batch": study.FULL} for gate in gates for state in wide]
    return tables.predicted_lengths(found)


ledger.watch(__name__)
