"""What has which colour: the same on all pages, and told apart within a figure."""

import re

import pandas as pd
import pytest
from matplotlib.artist import Artist
from matplotlib.colors import to_hex

from labkit import paths
from labkit.report import colours, plots

COUNT = len(plots.SERIES)
DRAWN = {path.name: path.read_text("utf-8") for path in paths.FIGURES.glob("*.svg")}
BLUE, ORANGE, GREEN, GREY = (plots.SERIES[place] for place in (0, 1, 2, 8))


def frame(*names: str) -> pd.DataFrame:
    return pd.DataFrame({"series": names, "x": "one", "y": 1.0})


def keys(plot: object, *names: str) -> dict[str, Artist]:
    """The legend's key of each series."""
    fig = plot(frame(*names), "x", "y", "series", xlabel="x", ylabel="y", title="t")
    (legend,) = fig.legends
    return dict(zip(names, legend.legend_handles, strict=True))


@pytest.mark.parametrize(
    ("name", "colour"),
    [
        ("cuBLAS, merged", ORANGE), ("torch.mv", ORANGE), ("F.grouped_mm, bf16 weights", ORANGE),
        ("separate kernels, cuBLAS", ORANGE), ("[V, K], tile 32", BLUE), ("this lab [V, K], slots in order", BLUE),
        ("[K, V], tile 8", GREEN), ("dependent launch, merged", BLUE), ("tuned, ordinary launch", GREEN),
        ("in-place multiply", GREY), ("plain read of as many bytes", GREY), ("one position (wrong)", GREY),
        ("attn-gym [V, K]", plots.SERIES[6]), ("SGLang", plots.SERIES[3]), ("vLLM 33291, published", plots.SERIES[7]),
        ("ExecuTorch 1.5.1 W4A16", plots.SERIES[4]), ("W4A16", plots.SERIES[4]), ("lab, as many CTAs as fit", GREEN),
    ],
)  # fmt: skip
def test_a_name_has_its_colour(name, colour):
    assert plots.SERIES[colours.place(name)] == colour


def test_a_name_that_is_not_known_has_none():
    assert [colours.place(name) for name in ("Qwen3-30B-A3B", "H100", 16, "work")] == [None] * 4


@pytest.mark.parametrize("plot", [plots.lines, plots.bars])
def test_a_colour_does_not_depend_on_what_stands_beside_it(plot):
    def colour(key):
        return key.get_color() if plot is plots.lines else key.get_facecolor()

    alone = keys(plot, "work", "cuBLAS, separate")
    among = keys(plot, "dependent launch", "ordinary launch", "cuBLAS, merged", "cuBLAS, separate")
    assert colour(alone["cuBLAS, separate"]) == colour(among["cuBLAS, separate"])
    assert len({str(colour(key)) for key in among.values()}) == 3


def test_a_name_without_a_colour_takes_none_that_another_has():
    assert colours.places(["a", "[V, K]", "b", "cuBLAS"], COUNT) == [(2, 0), (0, 0), (3, 0), (1, 0)]
    many = [place for place, _ in colours.places([*"abcdefghijkl", "cuBLAS"], COUNT)]
    assert many == [0, *range(2, COUNT), 0, 1, 2, 1]


def test_lines_of_one_colour_differ_in_marker_and_dash():
    looks = plots._looks([f"[V, K], tile {tile}" for tile in (8, 16, 32)])
    assert {look["color"] for look in looks} == {BLUE}
    assert len({look["marker"] for look in looks}) == len({str(look["linestyle"]) for look in looks}) == 3


def test_bars_of_one_colour_differ_in_the_hatch():
    hatches = [key.get_hatch() for key in keys(plots.bars, "cuBLAS, separate", "cuBLAS, merged").values()]
    assert hatches[0] is None
    assert hatches[1]


def test_of_one_series_the_bars_of_libraries_and_controls_have_their_own_colours():
    df = pd.DataFrame({"series": "speed", "x": ["a warp", "dependent launch", "cuBLAS", "read ceiling"], "y": 1.0})
    (container,) = plots.bars(df, "x", "y", "series", xlabel="x", ylabel="y", title="t").axes[0].containers
    found = [to_hex(bar.get_facecolor()) for bar in container]
    assert found == [BLUE, BLUE, ORANGE, GREY]


@pytest.mark.parametrize("pattern", colours.OURS | colours.VALUES)
def test_what_has_a_colour_is_in_a_figure(pattern):
    """In the figures of what is recorded; a pattern of nothing has no place in the list."""
    texts = [text for drawn in DRAWN.values() for text in re.findall(r"<text[^>]*>([^<]*)<", drawn)]
    assert any(re.search(pattern, text) for text in texts)
