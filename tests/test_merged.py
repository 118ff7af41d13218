"""What several GPUs show of one view becomes one figure and one table, and no number is lost."""

import pandas as pd
import pytest

from labkit.report import merged, plots
from labkit.report.figures import drawing

TEXTS = {"alt": "a", "caption": "c", "title": "t", "xlabel": "x"}


def ratios(ratio: float, rows: int = 2):
    table = pd.DataFrame({"row": [f"case {n}" for n in range(rows)], "ratio": ratio, "low": ratio, "high": ratio})
    return drawing(plots.ratios, table, "row", "ratio", "low", "high", **TEXTS)


def lines(y: float, **options):
    table = pd.DataFrame({"x": [1, 2], "y": [y, 2 * y], "s": "a", "p": ["left", "right"]})
    return drawing(plots.lines, table, "x", "y", "s", ylabel="y", **TEXTS, **options)


def test_ratios_of_all_gpus_stand_in_one_row_each_in_its_colour():
    made = merged.picture({"A": ratios(1.2), "B": ratios(0.8)})
    (ax,) = made.fig.axes
    assert len(ax.get_yticks()) == 2
    points = {round(float(x), 3) for line in ax.lines for x in line.get_xdata()}
    assert {1.2, 0.8} <= points
    assert {text.get_text() for text in made.fig.legends[0].get_texts()} == {"A", "B"}
    assert list(made.table) == ["row", "ratio · A", "ratio · B", "low · A", "low · B", "high · A", "high · B"]


def test_one_of_the_gpus_may_lack_a_row():
    made = merged.picture({"A": ratios(1.2, 2), "B": ratios(0.8, 1)})
    assert len(made.data) == 3
    assert made.fig.axes[0].get_yticks().tolist() == [0, 1]


def test_lines_stand_beside_each_other_on_one_axis():
    made = merged.picture({"A": lines(1.0), "B": lines(10.0)})
    one, other = made.fig.axes
    assert (one.get_title("left"), other.get_title("left")) == ("A", "B")
    assert one.get_ylim() == other.get_ylim()


def test_lines_in_panels_get_a_row_of_panels_a_gpu():
    axes = merged.picture({"A": lines(1.0, panel="p"), "B": lines(10.0, panel="p")}).fig.axes
    assert [ax.get_title("left") for ax in axes] == ["A · left", "A · right", "B · left", "B · right"]
    assert len({ax.get_ylim() for ax in axes}) == len({ax.get_xlim() for ax in axes}) == 1


def test_each_gpu_keeps_its_reference_lines():
    made = merged.picture({"A": lines(1.0, reference=[(3.0, "peak")]), "B": lines(1.0, reference=[(5.0, "peak")])})
    drawn = [{line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1} for ax in made.fig.axes]
    assert 3.0 in drawn[0]
    assert 5.0 not in drawn[0]
    assert 5.0 in drawn[1]


def test_one_gpu_alone_is_as_it_was():
    alone = lines(1.0)
    assert merged.picture({"A": alone}) is alone


def test_plots_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="one figure cannot hold lines and ratios: c"):
        merged.picture({"A": lines(1.0), "B": ratios(1.0)})


def frame(**columns):
    return pd.DataFrame(columns)


def test_columns_that_are_the_same_stand_once():
    tables = {gpu: frame(batch=[1, 8], us=times, MB=[2, 16]) for gpu, times in (("A", [1.0, 2.0]), ("B", [3.0, 4.0]))}
    made = merged.table(tables)
    assert list(merged.flat(made)) == ["batch", "us · A", "us · B", "MB"]
    assert made[("us", "B")].tolist() == [3.0, 4.0]
    assert merged.formats(made, {"us": "{:.0f}"}) == {("us", "A"): "{:.0f}", ("us", "B"): "{:.0f}"}


def test_many_columns_that_differ_stand_beneath_each_other_by_case():
    tables = {gpu: frame(batch=[1, 8], **{name: [n, n + 1] for name in "abcde"}) for n, gpu in enumerate(("A", "B"))}
    made = merged.table(tables)
    assert list(made)[:2] == ["batch", "GPU"]
    assert made["batch"].tolist() == [1, 1, 8, 8]
    assert made["GPU"].tolist() == ["A", "B", "A", "B"]


def test_tables_of_other_cases_keep_all_lines():
    made = merged.table({"A": frame(batch=[1, 8], us=[1, 2]), "B": frame(batch=[4], us=[3])})
    assert made.to_dict("list") == {"GPU": ["A", "A", "B"], "batch": [1, 8, 4], "us": [1, 2, 3]}


def test_an_empty_table_is_left_out():
    made = merged.table({"A": frame(batch=[1], us=[1]), "B": frame(batch=[], us=[])})
    assert made.to_dict("list") == {"batch": [1], "us": [1]}
