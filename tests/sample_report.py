"""A small report made from notebooks that were never run, for the tests of the pages and of the browser."""

from pathlib import Path

import nbformat
import pandas as pd
from nbformat import NotebookNode, v4

from labkit.bench.claim import ESTIMATE, OWN, Claim, Judgement
from labkit.report import figures, index, pages, plots

LONG = "V-first, BV = 32, four warps, " * 8


def frame() -> pd.DataFrame:
    """Two layouts on two GPUs: batch, µs, its interval."""
    rows = [
        {"gpu": gpu, "layout": layout, "batch": batch, "us": us, "low": us * 0.97, "high": us * 1.04}
        for gpu, scale in (("NVIDIA H100 80GB HBM3", 1.0), ("NVIDIA H200", 0.8))
        for layout, factor in (("[V, K]", 1.0), ("[K, V]", 1.09))
        for batch in (1, 4, 16, 64, 256)
        for us in [(3 + 0.4 * batch) * scale * factor]
    ]
    return pd.DataFrame(rows)


def shown(name: str, fig: object, table: object = None) -> NotebookNode:
    """A figure as the output of a cell."""
    html = figures.show(fig, name=name, alt=f"Alt of {name}", caption=f"Caption of {name}.", table=table)
    return output(html._repr_html_(), repr(html))


def output(html: str, plain: str = "") -> NotebookNode:
    return v4.new_output("execute_result", {"text/html": html, "text/plain": plain}, execution_count=1)


def code(source: str, *outputs: NotebookNode, tags: tuple[str, ...] = ()) -> NotebookNode:
    return v4.new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def notebook(*, error: bool = False) -> NotebookNode:
    """An executed notebook with everything that a page must show."""
    df = frame()
    axes = {"xlabel": "sequences in the batch", "low": "low", "high": "high"}
    lines = plots.lines(
        df, "batch", "us", "layout", panel="gpu", ylabel="µs per call", title="One decode step", logx=True, **axes
    )
    bars = plots.bars(df[df.gpu == "NVIDIA H200"], "batch", "us", "layout", ylabel="µs", title="As bars", **axes)
    wide = df.assign(**{f"column {i}": i * 1000.5 for i in range(12)})
    cells = [
        v4.new_markdown_cell("# State layout of *decode*\n\nWhich layout, and [the machine](00_machine.ipynb#launch)?"),
        code('source: str = "auto"  # auto, measure or recorded', tags=("parameters",)),
        v4.new_markdown_cell(
            f"## Claim & source\n\n`{LONG.replace(' ', '_')}`\n\nSee [upstream](https://example.org/x)."
        ),
        code(f"x = '{LONG}'  # a long line", v4.new_output("stream", name="stdout", text=LONG + "\n")),
        v4.new_markdown_cell(
            "## Measurement\n\n| layout | tile |\n|---|---|\n| `[V, K]` | 8 |\n\n- one\n- two\n\n### Detail"
        ),
        code("show(lines)", shown("lines", lines, df)),
        code("show(bars)", shown("bars", bars, figures.table(wide, "A wide table", {"us": "{:.1f}"}))),
        code("widgets()", output("<b>SLIDER</b>"), tags=("lab-only",)),
        v4.new_markdown_cell("## Verdict"),
        code("badge", output(figures.badge("reproduced")._repr_html_() + figures.note("A <note> & more.").html)),
        code("frame", output(wide._repr_html_())),
        code("claims", output("".join(f'<p id="claim-{name}">{name}</p>' for name in ("run-length", "speed")))),
    ]
    if error:
        raised = v4.new_output(
            "error", ename="ValueError", evalue="batch is <0>", traceback=["\x1b[31mValueError\x1b[0m"]
        )
        cells.insert(4, code("raise ValueError", raised))
    return v4.new_notebook(
        cells=cells, metadata={"language_info": {"name": "python", "pygments_lexer": "ipython3"}, "title": ""}
    )


def write(folder: Path) -> Path:
    """A whole report: index, two pages. Returns its folder."""
    entries = [
        pages.StudyEntry(
            "What this GPU can do", "Ceilings and launch cost.", "00_machine.html", "recorded on NVIDIA H100"
        ),
        pages.StudyEntry("State layout of decode", "Is [V, K] faster?", "01_layout.html", "measured here", failed=True),
    ]
    machine = v4.new_notebook(cells=[v4.new_markdown_cell("# What this GPU can do\n\n## launch\n\nText.")])
    for name, book in (("00_machine", machine), ("01_layout", notebook(error=True))):
        nbformat.write(book, folder / f"{name}.ipynb")
    pages.page(folder / "00_machine.ipynb", folder / "00_machine.html", following=entries[1])
    pages.page(folder / "01_layout.ipynb", folder / "01_layout.html", previous=entries[0], status="recorded 2025-11-21")
    built = {"labkit": "0.1.0", "torch": "2.13.0"}
    index.write(entries, findings(), claims(), machines(), folder / "index.html", built)
    return folder


def machines() -> list[index.Machine]:
    facts = {"driver": "580.1", "in place": "3.00 TB/s", "read": "3.11 TB/s"}
    return [
        index.Machine("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", "recorded 2025-11-21", facts),
        index.Machine("nvidia-h200-here", "NVIDIA H200", "measured here", {"driver": "580.2"}),
    ]


def claims() -> list[index.ClaimRow]:
    def claim(name: str) -> Claim:
        return Claim(
            id=name,
            source="SGLang 20283",
            url="https://github.com/sgl-project/sglang/pull/20283",
            statement="State [V, K] <makes> decode faster than [K, V]",
            condition="H100, Qwen3-Next, fp32 state",
            published="7 to 8 % of the whole step",
            ruled="2025-11-20",
            quantity="time of [K, V] over that of [V, K]",
            untested="a page is made here, and nothing judged",
        )

    good = index.Result(
        Judgement("reproduced", "1.09 [1.08, 1.10]: gain", "contiguous runs", "holds", "as published", OWN),
        figure="1.09 [1.08, 1.10]",
        why="contiguous runs of 256 elements, not 8",
    )
    bad = index.Result(
        Judgement("not reproduced", "1.00 [0.99, 1.01]: gain", "both layouts", "fails", "less", OWN),
        earlier_kernel=True,
        rule_changed=True,
        figure="1.00 [0.99, 1.01]",
        why="both layouts reach 97 %",
    )
    weak = index.Result(
        Judgement("consistent", "6.1 %: gain", "71 % of the step", "holds", "more", ESTIMATE),
        figure="6.1 %",
        why="decode is 71 % of the step, its ratio 1.09",
    )
    no = index.Result(None, error="no rows for batch 64")
    h100, h200 = "nvidia-h100-80gb-hbm3", "nvidia-h200-here"
    study, page = "State layout of decode", "01_layout.html"
    return [
        index.ClaimRow(claim("run-length"), "layout", study, page, {h100: good, h200: bad}),
        index.ClaimRow(claim("speed"), "layout", study, page, {h100: weak}),
        index.ClaimRow(claim("table"), "layout", study, "", {h100: no}),
        index.ClaimRow(claim("speed"), "grid", "The grid", page, {h100: weak, h200: weak}),
    ]


def findings() -> list[index.Finding]:
    said = figures.Html('[V, K] is <data class="origin" value="1.09" title="x">1.09</data>× faster', "")
    return [index.Finding("State layout of decode", "01_layout.html", said, "keep <V> first")]
