"""The small words of sentences."""

import pandas as pd

from labkit.report import words


def test_a_span_is_said_once_where_both_ends_read_the_same():
    assert words.span(pd.Series([1.31, 0.98, 1.1])) == "0.98 to 1.31"
    assert words.span(pd.Series([1.001, 0.999])) == "1.00"
    assert words.span(pd.Series([80.4, 91.0]), "{:.0f}") == "80 to 91"


def test_means_and_intervals():
    assert words.mean(pd.Series([0.5, 2.0])) == "×1.00 in the mean of 2 cases, ×0.50 to 2.00"
    line = {"ratio": 1.312, "low": 1.2949, "high": 1.33}
    assert words.interval(line) == "×1.31 [1.29, 1.33]"
    assert words.interval(pd.Series(line), 3) == "×1.312 [1.295, 1.330]"


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
