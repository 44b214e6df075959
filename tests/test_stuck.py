"""harness/stuck.py."""

from __future__ import annotations

import threading
import time

import pytest

from harness.stuck import said_where


def _takes_long(seconds: float) -> None:
    time.sleep(seconds)


def test_it_says_where_again_and_again(capfd: pytest.CaptureFixture[str]) -> None:
    with said_where(0.1):
        _takes_long(0.75)
    said = capfd.readouterr().err
    assert said.count("0.1 s more without a result") > 2 and said.count("_takes_long") > 2


def test_nothing_is_said_of_what_is_short_or_over(capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), said_where(0.2):
        _ = 1 / 0
    assert threading.active_count() == before
    time.sleep(0.4)
    assert capfd.readouterr().err == ""
