"""Figures: the same bytes each time, readable in light and dark, nothing cut off, never without a description."""

import base64
import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from labkit.report import figures, plots

GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition")
LONG = "Milliseconds of one decode step of the gated delta rule, launch and gather included, against the batch"
MIDDLE = "time of [K, V] / time of [V, K], cold L2"


def frame(series: int = 3, panels: int = 1) -> pd.DataFrame:
    rows = itertools.product(GPUS[:panels], range(series), [1, 2, 4, 8, 16, 32, 64, 128, 256])
    df = pd.DataFrame(rows, columns=["gpu", "index", "batch"])
    df["us"] = (3 + 0.4 * df.batch) * (1 + 0.1 * df["index"])
    df["variant"] = [f"[N, HV, V, K], BV = {8 * 2**index}, {index + 1} warps" for index in df["index"]]
    df["ratio"] = 0.96 + 0.02 * df["index"]
    return df.assign(low=df.us * 0.9, high=df.us * 1.2, least=df.ratio - 0.008, most=df.ratio + 0.009)


def lines(series: int = 3, panels: int = 1, **options: object) -> Figure:
    names = {"xlabel": MIDDLE, "ylabel": "µs per call", "title": LONG, "logx": True} | options
    return plots.lines(frame(series, panels), "batch", "us", "variant", panel="gpu", low="low", high="high", **names)


def bars(series: int, panels: int, x: str = "batch") -> Figure:
    df = frame(series, panels)
    df["place"] = df.batch.map("pageable host-to-device copy of {} MiB".format)
    df = df[df.batch < 9]
    reference = [(3.0, "in-place ceiling, 3.00 TB/s"), (3.1, "read-only ceiling"), (3.2, "copy")]
    return plots.bars(df, x, "us", "variant", panel="gpu", xlabel=MIDDLE, ylabel="µs", title=LONG, reference=reference)


def ratios(panels: int = 1, verdict: str | None = None) -> Figure:
    df = frame(5, panels)
    df = df[df.batch < 3].assign(word="unclear")
    panel = "gpu" if panels > 1 else None
    return plots.ratios(
        df, "variant", "ratio", "least", "most", group="batch", panel=panel, verdict=verdict, xlabel=MIDDLE, title=LONG
    )


def heat(panels: int = 1, **options: object) -> Figure:
    df = frame(6)
    if panels > 1:
        df = pd.concat([df[df.batch < 16].assign(place=f"place {number}") for number in range(panels)])
        options["panel"] = "place"
    return plots.heat(df, "batch", "variant", "us", xlabel=LONG, ylabel="variant", title=LONG, unit="µs", **options)


def many_ratios(gpus: int, label: str = "batch {}") -> Figure:
    df = pd.concat([frame(5).assign(gpu=gpu) for gpu in GPUS[:gpus]])
    df["case"] = df.batch.map(label.format)
    hue = "gpu" if gpus > 1 else None
    return plots.ratios(df, "case", "ratio", "least", "most", group="index", hue=hue, xlabel=MIDDLE, title=LONG)


def decades() -> Figure:
    df = frame(3, 2)
    df["us"] *= 10.0 ** (2 * df["index"] - 4)
    names = {"xlabel": "batch", "ylabel": "relative RMSE of the state (log)", "title": LONG, "logx": True, "logy": True}
    return plots.lines(df, "batch", "us", "variant", panel="gpu", rows="index", **names)


PLOTS = {
    "lines": lambda: lines(),
    "lines of ten": lambda: lines(
        10, 1, logy=True, reference=[(50, "a reference with a long name"), (51, "another one")]
    ),
    "lines in panels": lambda: lines(3, 3),
    "lines over names": lambda: plots.lines(
        frame(), "variant", "us", "batch", xlabel="variant", ylabel="µs", title="Names"
    ),
    "bars": lambda: bars(2, 1),
    "bars of ten": lambda: bars(10, 2),
    "bars over long names": lambda: bars(2, 1, "place"),
    "ratios": lambda: ratios(),
    "ratios in panels": lambda: ratios(3),
    "ratios of many rows": lambda: many_ratios(1),
    "ratios of many rows with long names": lambda: many_ratios(2, "[N, HV, V, K], BV = 8, 2 warps, batch {}"),
    "ratios of many rows and two GPUs": lambda: many_ratios(2),
    "lines over decades": lambda: decades(),
    "heat": lambda: heat(),
    "heat around one": lambda: heat(center=10.0),
    "heat in panels": lambda: heat(4),
}


@pytest.fixture(params=list(PLOTS))
def fig(request: pytest.FixtureRequest) -> Figure:
    drawn = PLOTS[request.param]()
    FigureCanvasAgg(drawn)  # measures texts
    return drawn


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 1


def test_nothing_is_cut_off_or_written_over(fig: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Text] = []  # ticks outside the view exist, but are not drawn
    draw = Text.draw
    monkeypatch.setattr(Text, "draw", lambda self, renderer: (drawn.append(self), draw(self, renderer))[1])
    with plots.style():
        fig.canvas.draw()
        width, height = fig.bbox.size
        places = [(text, Text.get_window_extent(text).extents) for text in drawn if text.get_text().strip()]
    assert len(places) > 5
    for text, (x0, y0, x1, y1) in places:
        assert min(x0, y0) > -1, text
        assert x1 < width + 1, text
        assert y1 < height + 1, text
    upright = [(text.get_text(), box) for text, box in places if text.get_rotation() % 90 == 0]
    for (one, a), (two, b) in itertools.combinations(upright, 2):
        assert not overlap(a, b), f"{one!r} over {two!r}"


def test_axes_keep_most_of_the_figure(fig: Figure) -> None:
    with plots.style():
        fig.canvas.draw()
        heights = {round(ax.get_position().y0, 2): ax.get_position().height for ax in fig.axes}
    assert sum(heights.values()) > 0.4


def test_text_is_large_enough(fig: Figure) -> None:
    assert min(text.get_fontsize() for text in fig.findobj(Text)) >= 9


@pytest.mark.parametrize("plot", ["lines of ten", "bars of ten", "ratios", "heat", "heat in panels"])
def test_same_data_same_bytes(plot: str) -> None:
    assert plots.svg(PLOTS[plot](), "alt") == plots.svg(PLOTS[plot](), "alt")


def test_svg_is_xml_with_title_and_dark_style(fig: Figure) -> None:
    text = plots.svg(fig, "Less <is> more").decode()
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert root[0].text == "Less <is> more"
    dark = re.search(r"@media \(prefers-color-scheme:dark\)\{(.*?\})\}</style>", text)[1]
    light = dict(re.findall(r"\.(c\d+)\{([^}]*)\}", text.split("@media")[0]))
    for colour in (plots.INK, plots.SOFT, plots.PAPER):
        (name, *_) = [name for name, style in light.items() if f"fill: {colour}" in style]
        assert f".{name}{{fill:{plots.DARK[colour]}}}" in dark
    assert "date" not in text.lower()
    assert root.find("{*}path").get("class") in light  # its own background


def test_every_colour_of_a_line_plot_has_a_dark_twin() -> None:
    used = set(re.findall(r"#[0-9a-f]{6}", plots.svg(lines(10), "alt").decode().split("@media")[0]))
    assert used <= set(plots.DARK)
    assert set(plots.SERIES) <= used


def luminance(colour: str) -> float:
    channels = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_both_modes() -> None:
    for colour, least in [(plots.INK, 7), (plots.SOFT, 4.5), *((name, 3) for name in plots.SERIES)]:
        assert contrast(colour, plots.PAPER) >= least
        assert contrast(plots.DARK[colour], plots.DARK[plots.PAPER]) >= least


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB: what protanopes and deuteranopes see.
BLIND = {
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def seen(colour: str, kind: str) -> np.ndarray:
    """CIE Lab of the colour as seen."""
    channels = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    rgb = np.clip(np.array(BLIND[kind]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(xyz / [0.9505, 1, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", BLIND)
def test_first_five_series_are_told_apart_without_red_or_green(kind: str) -> None:
    for palette in (plots.SERIES[:5], [plots.DARK[colour] for colour in plots.SERIES[:5]]):
        for one, two in itertools.combinations(palette, 2):
            assert np.linalg.norm(seen(one, kind) - seen(two, kind)) > 14, (one, two)


def test_ten_series_differ_in_colour_and_marker() -> None:
    looks = [(line.get_color(), line.get_marker()) for line in lines(10).legends[0].get_lines()]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 10


def test_many_rows_of_ratios_stand_closer() -> None:
    few, many = ratios(), many_ratios(1)
    heights = [fig.get_figheight() / len(fig.axes[0].get_yticks()) for fig in (few, many)]
    assert heights[1] < 0.24 < 0.29 < heights[0]


def test_a_legend_that_has_room_is_one_row() -> None:
    names = ["loads of 16 bytes", "tuned, ordinary launch", "dependent launch"]
    df = pd.DataFrame({"series": names, "x": 1, "y": 1.0})
    fig = plots.lines(df, "x", "y", "series", xlabel="x", ylabel="y", title="t")
    assert fig.legends[0]._ncols == 3


def test_a_solid_line_does_not_cover_a_dashed_one() -> None:
    first, second = (container.lines[0] for container in lines(2).axes[0].containers)
    assert (first.get_linestyle(), second.get_linestyle()) == ("-", "--")
    assert first.get_zorder() < second.get_zorder()


def test_interval_bars_span_low_to_high() -> None:
    container = lines(1).axes[0].containers[0]
    ends = container.lines[2][0].get_segments()[0][:, 1]
    assert ends == pytest.approx([3.4 * 0.9, 3.4 * 1.2])


def test_bars_may_carry_their_values() -> None:
    df = pd.DataFrame({"x": ["a", "b"], "y": [7.6, 81.2], "s": "one"})
    texts = {
        fmt: [
            text.get_text()
            for text in plots.bars(df, "x", "y", "s", fmt=fmt, xlabel="x", ylabel="y", title="t").axes[0].texts
        ]
        for fmt in ("", "{:.0f}")
    }
    assert texts == {"": [], "{:.0f}": ["8", "81"]}


def test_ratio_colours_follow_the_interval_or_the_verdict_given() -> None:
    def words(fig: Figure) -> list[str]:
        return [text.get_text() for text in fig.legends[0].get_texts()]

    assert words(ratios()) == ["above 1", "below 1", "within ±1 % of 1"]
    assert words(ratios(verdict="word")) == ["unclear"]


def test_a_series_may_have_no_interval() -> None:
    df = frame(2)
    df.loc[df["index"] == 1, ["low", "high"]] = np.nan
    fig = plots.lines(df, "batch", "us", "variant", low="low", high="high", xlabel="x", ylabel="y", title="t")
    assert b"nan" not in plots.svg(fig, "alt").lower()


def test_style_is_not_left_behind() -> None:
    before = dict(mpl.rcParams)
    lines()
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plots.lines(frame(), "bach", "us", "variant", xlabel="", ylabel="", title=""),
            "no column 'bach' to draw; there are: gpu",
        ),
        (lambda: plots.bars(frame()[:0], "batch", "us", "variant", xlabel="", ylabel="", title=""), "no rows"),
        (lambda: plots.heat(frame(), "batch", "gpu", "us", xlabel="", ylabel="", title=""), "more than one us"),
        (lambda: plots.heat(frame(), "batch", "gpu", "us", panel="place", xlabel="", ylabel="", title=""), "'place'"),
        (lambda: ratios(verdict="gpu"), "verdict 'NVIDIA H100 80GB HBM3'; allowed: faster"),
        (lambda: figures.table(frame(), formats={"uss": "{}"}), "no column 'uss'"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_show_embeds_the_figure_and_writes_it(reports: Path) -> None:
    shown = figures.show(
        lines(), name="one", alt='An "alt" <b>', caption="A caption & more", table=frame(), gpu="nvidia-h100"
    )
    html = shown._repr_html_()
    assert html.startswith('<figure class="lab" id="one">')
    assert 'alt="An &#34;alt&#34; &lt;b&gt;"' in html
    assert "<figcaption>A caption &amp; more</figcaption>" in html
    assert html.index("</figcaption>") < html.index("<summary>Table</summary>") < html.index("<table")
    data = base64.b64decode(re.search(r"base64,([^\"]*)", html)[1])
    assert data == (reports / "figures" / "nvidia-h100" / "one.svg").read_bytes()
    assert data.startswith(b"<svg ")
    assert "A caption" in repr(shown)


def test_show_without_gpu_goes_to_all(reports: Path) -> None:
    figures.show(lines(), name="two", alt="a", caption="c")
    assert [str(path.relative_to(reports)) for path in reports.rglob("*.svg")] == ["figures/all/two.svg"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alt": ""}, "alt is empty"),
        ({"alt": "  \n"}, "alt is empty"),
        ({"caption": ""}, "caption is empty"),
        ({"name": "../x"}, "name is '../x'"),
        ({"gpu": "a/b"}, "gpu is 'a/b'"),
    ],
)
def test_show_refuses(reports: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figures.show(lines(), **({"name": "x", "alt": "a", "caption": "c"} | change))
    assert not list(reports.rglob("*.svg"))


def test_show_closes_a_pyplot_figure(reports: Path) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    fig = plt.figure()
    figures.show(fig, name="x", alt="a", caption="c")
    assert not plt.fignum_exists(fig.number)


def test_table_is_accessible_and_escaped() -> None:
    df = pd.DataFrame({"layout": ["<V>", "K"], "µs": [1.23456, float("nan")], "n": [12345678, 2], "ok": [True, False]})
    html = figures.table(df, "Times & more", {"µs": "{:.2f}"}).html
    assert "<figcaption>Times &amp; more</figcaption>" in html
    assert '<th scope="col">layout</th><th scope="col" class="n">µs</th>' in html
    assert '<th scope="row">&lt;V&gt;</th><td data-v="1.23456">1.23</td><td>12345678</td><td>yes</td>' in html
    assert '<tbody class="n2 n3">' in html
    assert '<th scope="row">K</th><td>—</td>' in html
    assert "overflow-x:auto" in html


@pytest.mark.parametrize(
    ("number", "text"), [(3.4, "3.400"), (3.0, "3"), (12345.6, "12346"), (0.00012345, "0.0001234"), (1e-9, "1.000e-09")]
)
def test_table_shows_four_digits(number: float, text: str) -> None:
    assert f"<td>{text}</td>" in figures.table(pd.DataFrame({"a": ["x"], "b": [number]})).html


def test_table_wraps_long_text_only() -> None:
    html = figures.table(pd.DataFrame({"a": ["x"], "b": ["short"], "c": [LONG]})).html
    assert "<td>short</td>" in html
    assert f'<td class="t">{LONG}</td>' in html


def test_table_takes_a_named_index_and_two_level_columns() -> None:
    df = pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("H100", "µs"), ("H200", "µs")]))
    assert "H100 · µs" in figures.table(df).html
    indexed = pd.DataFrame({"us": [1.0]}, index=pd.Index(["a"], name="variant"))
    assert '<th scope="row">a</th><td>1</td>' in figures.table(indexed).html


@pytest.mark.parametrize(
    "verdict", ["reproduced", "not reproduced", "consistent", "not testable here", "same", "unclear"]
)
def test_badge_says_it_in_words_and_by_a_sign(verdict: str) -> None:
    html = figures.badge(verdict).html
    assert verdict in html
    assert html.split(">")[1][0] in "✓✗≈?"


def test_badge_and_note_escape() -> None:
    assert "<b>" not in figures.badge("<b>").html + figures.note("<b>").html


# a view's figure, with its texts and table


def drawn(**options: object) -> figures.Picture:
    names = {"alt": "Lines.", "caption": "Times.", "xlabel": "batch", "ylabel": "µs", "title": "T"} | options
    return figures.drawing(plots.lines, frame(2), "batch", "us", "variant", **names)


def test_a_drawing_is_what_show_takes(reports):
    found = drawn()
    assert (found.alt, found.caption) == ("Lines.", "Times.")
    assert found.fig.get_suptitle() == "T"
    pd.testing.assert_frame_equal(found.table, frame(2))
    assert "<figcaption>Times.</figcaption>" in figures.shown("drawn", found).html
    assert [path.name for path in reports.rglob("*.svg")] == ["drawn.svg"]


def test_a_hidden_column_is_said_of_each_row():
    table = drawn(hidden=["gpu", "low"]).table
    assert "gpu" not in table
    html = figures.table(table.head(2)).html
    assert ">low<" not in html
    assert re.findall(r'<tr data-low="([^"]*)">', html) == [f"{low:.6g}" for low in frame(2).low.head(2)]
    missing = table.head(1).assign(low=float("nan"))
    assert "data-low" not in figures.table(missing).html


@pytest.mark.parametrize(
    ("value", "form", "said"),
    [
        (1.23456, "{:.1f}", "1.23456"), (0.00004, "{:+.2f}", "4e-05"), (1.2, "×{:.1f}", "1.2"), (1234567, "{:,}", None),
        (1.23456, None, None), (7, None, None), (float("nan"), None, None), (True, None, None), ("12", None, None),
    ],
)  # fmt: skip
def test_a_number_of_which_the_text_says_less_is_beside_it(value, form, said):
    html = figures.table(pd.DataFrame({"a": ["x"], "b": [value]}), formats={"b": form} if form else None).html
    assert re.findall(r'data-v="([^"]*)"', html) == ([said] if said else [])


def test_a_table_with_a_caption_has_an_address():
    html = figures.table(frame().head(1), "Time (µs) of each case, batch and layout of all GPUs. Recorded.").html
    assert html.startswith('<figure class="lab-table" id="time-µs-of-each-case-batch-and-layout">')


def test_what_a_figure_comes_to_ends_both_texts():
    found = drawn(said="Least 3 µs")
    assert (found.alt, found.caption) == ("Lines. Least 3 µs.", "Times. Least 3 µs.")


def test_the_table_of_a_drawing():
    assert list(drawn(table=["batch", "us"], units={"us": "µs"}).table) == ["batch", "µs"]
    hidden = drawn(hidden=["gpu", "index", "no such"]).table
    assert list(hidden) == [name for name in frame(2) if name not in ("gpu", "index")]
    other = pd.DataFrame({"us": [1.0]})
    assert list(drawn(table=other, units={"us": "µs"}).table) == ["µs"]
    assert list(other) == ["us"]  # renamed in a copy
    with pytest.raises(KeyError, match="no such"):
        drawn(table=["no such"])


def test_every_column_of_numbers_has_a_rule_in_the_style_sheet():
    css = (Path(figures.__file__).parent / "template/lab.css").read_text()
    wide = pd.DataFrame([range(24)], columns=[f"c{place}" for place in range(24)])
    for name in re.search('<tbody class="([^"]*)">', figures.table(wide).html)[1].split():
        assert f".{name} > tr > :nth-child({name[1:]})" in css
