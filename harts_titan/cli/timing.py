"""What the timing commands share."""

from __future__ import annotations

import platform

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of the device for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
