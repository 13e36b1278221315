"""The number format that makes this machine faster."""

from pathlib import Path

import torch

FAST_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


def pick_precision(requested: str, *, accelerator: str, tiny: bool = False) -> tuple[str, str]:
    """Lightning's `precision` and the reason, for the log. Anything but "auto" is taken as it is.

    bf16 needs no loss scaling and keeps float32 weights under "bf16-mixed", so it is the default wherever the processor
    multiplies it faster than float32: any GPU that supports it, and CPUs with AMX or AVX512-BF16 instructions.
    """
    if requested != "auto":
        return requested, "as configured"
    if tiny:
        return "32-true", "the model is so small that casts cost more than they save"
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported():
            return "bf16-mixed", f"{torch.cuda.get_device_name()} multiplies bfloat16 faster"
        return "16-mixed", f"{torch.cuda.get_device_name()} has no bfloat16"
    if accelerator in ("auto", "mps") and torch.backends.mps.is_available():
        return "32-true", "bfloat16 is not reliably faster on Apple's GPU"
    found = [flag for flag in FAST_BF16_FLAGS if flag in cpu_flags()]
    if found:
        return "bf16-mixed", f"this CPU multiplies bfloat16 faster ({', '.join(found)})"
    return "32-true", "this CPU has no fast bfloat16"


def cpu_flags() -> set[str]:
    """Instruction sets of the first core, as Linux names them; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return set()
    for line in info.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()
