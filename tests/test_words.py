"""The small words of sentences."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.report import words


def test_a_span_is_said_once_where_both_ends_read_the_same():
    assert words.span(pd.Series([1.31, 0.98, 1.1])) == "0.98 to 1.31"
    assert words.span(pd.Series([1.001, 0.999])) == "1.00"
    assert words.span(pd.Series([80.4, 91.0]), "{:.0f}") == "80 to 91"


@pytest.mark.parametrize(
    ("ratio", "said", "than"),
    [
        (1.29, "1.29× faster", "1.29× faster than cuBLAS"),
        (1 / 1.1, "1.10× slower", "1.10× slower than cuBLAS"),
        (1.0, "as fast", "as fast as cuBLAS"),
        (1.004, "as fast", "as fast as cuBLAS"),
        (1 / 1.004, "as fast", "as fast as cuBLAS"),
        (1.006, "1.01× faster", "1.01× faster than cuBLAS"),
        (1 / 1.006, "1.01× slower", "1.01× slower than cuBLAS"),
    ],
)
def test_how_much_faster(ratio, said, than):
    assert words.faster(ratio) == said
    assert words.faster(ratio, "cuBLAS") == than


@given(st.floats(0.01, 100))
def test_what_reads_as_one_has_no_side_and_the_other_way_round_is_the_other_side(ratio):
    there, back = words.faster(ratio), words.faster(1 / ratio)
    assert not there.startswith("1.00")
    for side in ("faster", "slower"):
        assert not (there.endswith(side) and back.endswith(side))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([0.5, 0.8], "1.25× to 2.00× slower than X"), ([1.1, 1.3], "1.10× to 1.30× faster than X"),
        ([0.5, 1.3], "2.00× slower to 1.30× faster than X"), ([2.0, 2.0], "2.00× faster than X"),
        ([2.0, 2.001], "2.00× faster than X"), ([0.999, 1.06], "as fast to 1.06× faster than X"),
        ([1.001, 1.06], "as fast to 1.06× faster than X"), ([0.9, 1.001], "1.11× slower to as fast as X"),
        ([0.9, 0.999], "as fast to 1.11× slower than X"), ([0.999, 1.001], "as fast as X"),
    ],
)  # fmt: skip
def test_the_least_and_the_most_that_something_is_faster(ends, said):
    assert words.gains(pd.Series(ends), "X") == said
    assert words.gains(pd.Series(ends)) == said.removesuffix(" than X").removesuffix(" as X")


def test_sentences_numbers_and_tokens():
    assert words.sentences(["One.", "", "Two."], "None.") == "One. Two."
    assert words.sentences(["", ""], "None.") == "None."
    assert [words.rounded(value) for value in (0.1234, 126.0)] == [0.12, 130.0]
    assert [words.tokens(count) for count in (1, 2, 0)] == ["1 token", "2 tokens", "0 tokens"]


def test_spans_and_lines_are_in_the_order_of_the_table():
    table = pd.DataFrame({"of": ["b", "a", "b"], "in": ["x", "y", "x"], "time, µs": [1.0, 2.0, 3.0]})
    assert words.spans(table, "of", "time, µs", "{:.0f}") == ["b 1 to 3", "a 2"]
    assert words.spans(table, ["of", "in"], "time, µs", "{:.0f}") == ["b, x 1 to 3", "a, y 2"]
    assert words.filled(table, "{of}: {time, µs:.1f}") == ["b: 1.0", "a: 2.0", "b: 3.0"]
    assert words.filled(table[:0], "{of}") == words.spans(table[:0], "of", "time, µs") == []
