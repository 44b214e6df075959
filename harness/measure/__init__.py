"""Device time: clocks, the gate that keeps the GPU ahead of the host, CUPTI, NVML, statistics."""
