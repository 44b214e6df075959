"""Clocks, temperature, power and throttle reasons of the GPU that is measured, read through NVML."""

from __future__ import annotations

import time
from typing import Any

import pynvml
import torch

# What slows a GPU down. Idle and application clocks, the other two common reasons, do not.
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


class Monitor:
    """Collects one reading a round, taken while the GPU is busy."""

    def __init__(self, device: torch.device) -> None:
        self._handle = handle(device)
        self.readings: list[tuple[int, int, float, frozenset[str]]] = []

    def settle(self, seconds: float = 2.0) -> None:
        """Waits, no longer than that, until the GPU no longer throttles for the sake of what ran before."""
        deadline = time.perf_counter() + seconds
        while self._throttling() and time.perf_counter() < deadline:
            time.sleep(0.02)

    def _throttling(self) -> frozenset[str]:
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return frozenset(name for bit, name in THROTTLE.items() if reasons & bit)

    def read(self) -> None:
        """One reading; costs about 0.1 ms of the host's time."""
        self.readings.append(
            (
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
