"""Clocks, temperature, power and throttle reasons of the measured GPU, read through NVML."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pynvml
import torch

# Reasons that slow a GPU down. The other two common ones, idle and application clocks, do not.
THROTTLE = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake",
}


def handle(device: torch.device) -> Any:
    """NVML's handle of a torch device, matched by UUID: CUDA_VISIBLE_DEVICES renumbers only one of the two."""
    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


class Reading(NamedTuple):
    """State of a busy GPU at one moment."""

    sm_mhz: int
    temperature_c: int
    power_w: float
    throttle: frozenset[str]


def by_round(readings: Sequence[Reading]) -> dict[str, Any]:
    """The SM clock of each round in MHz, and the numbers of the rounds in which the GPU throttled."""
    return {
        "sm_mhz": [reading.sm_mhz for reading in readings],
        "throttled": [index for index, reading in enumerate(readings) if reading.throttle],
    }


def worst(readings: Sequence[Reading]) -> Reading:
    """Combines several readings of one round: the lowest clock, the highest temperature and power, all reasons."""
    clocks, temperatures, powers, reasons = zip(*readings, strict=True)
    return Reading(min(clocks), max(temperatures), max(powers), frozenset().union(*reasons))


class Monitor:
    """Collects one reading per round, taken while the GPU is busy."""

    def __init__(self, device: torch.device) -> None:
        self._handle = handle(device)
        self.readings: list[Reading] = []

    def settle(self, seconds: float = 2.0) -> None:
        """Waits, for at most `seconds`, until the GPU no longer throttles because of earlier work."""
        deadline = time.perf_counter() + seconds
        while self._throttling() and time.perf_counter() < deadline:
            time.sleep(0.02)

    def _throttling(self) -> frozenset[str]:
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return frozenset(name for bit, name in THROTTLE.items() if reasons & bit)

    def read(self) -> None:
        """Takes one reading; costs about 0.1 ms of host time."""
        self.readings.append(
            Reading(
                pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
                pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU),
                pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
                self._throttling(),
            )
        )

    def summary(self) -> dict[str, Any]:
        """The `clocks` object of a record row."""
        clocks, temperatures, powers, reasons = zip(*self.readings, strict=True)
        return {
            "sm_mhz": [min(clocks), max(clocks)],
            "temperature_c": [min(temperatures), max(temperatures)],
            "power_w": [round(min(powers)), round(max(powers))],
            "throttle": sorted(frozenset().union(*reasons)),
            "throttled_samples": sum(bool(r) for r in reasons),
            "samples": len(self.readings),
        }
