import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import units


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("400 Gb/s", "bytes/s", 50e9),  # 400e9 bits / 8
        ("300 GB/s", "bytes/s", 300e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 80e9),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("3.4 us", "seconds", 3.4e-6),
        ("2 h", "seconds", 7200.0),
        ("  25MB ", "bytes", 25e6),
    ],
)
def test_a_quantity_becomes_its_si_value(text, dimension, value):
    assert units.parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension", "part"),
    [
        (400, "bytes/s", "has no unit"),
        ("400", "bytes/s", "has no unit"),
        ("400 Gb", "bytes/s", "unknown unit 'Gb'"),
        ("fast", "bytes/s", "is not a number with a unit"),
        ("1e400 GB", "bytes", "is not a finite number"),
        ("", "seconds", "is not a number with a unit"),
    ],
)
def test_a_wrong_quantity_is_refused_with_an_example(text, dimension, part):
    with pytest.raises(ValueError, match=part) as caught:
        units.parse_quantity(text, dimension)
    assert units.EXAMPLES[dimension] in str(caught.value)


def test_every_example_is_right_itself():
    assert all(units.parse_quantity(text, name) > 0 for name, text in units.EXAMPLES.items())


@given(st.integers(min_value=0, max_value=2**62))
def test_ticks_survive_the_way_through_seconds_up_to_rounding(ticks):
    assert units.to_ticks(units.to_seconds(ticks)) == pytest.approx(ticks, rel=1e-15)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.0, "1 s"), (0.9995, "999.5 ms"), (3.4e-6, "3.4 us"), (86400, "86,400 s")],
)
def test_seconds_print_to_four_digits(seconds, text):
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (85.9e9, "85.9 GB"), (1.5e12, "1.5 TB")]
)
def test_bytes_print_in_decimal_units(count, text):
    assert units.format_bytes(count) == text
