"""Choosing a function of a table with the options it can use."""

from __future__ import annotations

import pytest

from alignment.losses.options import choose


def double(x: float, *, shift: float = 0.0) -> float:
    return 2 * x + shift


def power(x: float, *, exponent: int) -> float:
    return x**exponent


TABLE = {"double": double, "power": power}


def test_options_are_bound() -> None:
    assert choose(TABLE, "double", shift=1.0)(3) == 7
    assert choose(TABLE, "double")(3) == 6
    assert choose(TABLE, "power", exponent=2)(3) == 9


def test_none_is_the_default_and_off_fits_everywhere() -> None:
    assert choose(TABLE, "double", shift=None, exponent=None)(3) == 6
    assert choose(TABLE, "double", exponent=0)(3) == 6


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="'treble' does not exist: choose from double, power"):
        choose(TABLE, "treble")
    with pytest.raises(ValueError, match="double cannot use exponent=2"):
        choose(TABLE, "double", exponent=2)
    with pytest.raises(ValueError, match="power needs exponent"):
        choose(TABLE, "power")
