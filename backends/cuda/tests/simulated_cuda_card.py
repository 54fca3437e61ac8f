"""The card of CudaDevice on the conformance kit's simulated device, under a device type of its own."""

from __future__ import annotations

from attrs import evolve

from accel_cuda.card import CUDA

CARD = evolve(
    CUDA,
    name="cuda-simulated",
    probe=None,
    verify=None,
    priority=None,
    shadows=(),
    torch_device="simcuda",
    implementation="simulated_cuda:SimulatedCuda",
)
