"""What the timing needs of the system, as far as it can be seen without a GPU."""

from __future__ import annotations

import ctypes
import time

import pytest

from harness.measure.driver import Alarm


@pytest.fixture
def word():
    return (ctypes.c_int64 * 1)(0)


def test_an_alarm_goes_off_while_something_holds_the_interpreter(word):
    alarm = Alarm(ctypes.addressof(word), 0.05)
    ctypes.PyDLL(None).usleep(300_000)  # does not let go of the interpreter's lock
    assert word[0] == 1
    alarm.stop()


def test_an_alarm_that_is_stopped_goes_off_at_once(word):
    start = time.perf_counter()
    alarm = Alarm(ctypes.addressof(word), 3600.0)
    assert word[0] == 0
    alarm.stop()
    assert word[0] == 1
    assert time.perf_counter() - start < 5
