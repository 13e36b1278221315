"""Forward + backward of completion log-probs on SmolLM2-135M: dense, cached and packed prompts, in one run.

    python benchmarks/shared_prompt.py --rounds 5 --output benchmarks/shared_prompt.json

LoRA r=16 on all linear layers, bf16 autocast, gradients of the adapter. Paths alternate within each round, so that a
machine that slows down slows all of them; the ratios are medians over rounds of the time of dense to the other's.
`--clock cpu --threads 1` counts processor time, for a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from alignment.batch import Batch, Example, collate
from alignment.model.logprobs import completion_logprobs
from alignment.model.smollm2 import SmolLM2

SHAPES = {
    "2 prompts of 170, G=8, 32 tokens": (2, 170, 8, 32),
    "4 prompts of 200, G=2, 60 tokens": (4, 200, 2, 60),
    "1 prompt of 64, G=8, 256 tokens": (1, 64, 8, 256),
    "8 prompts of 120, G=1, 100 tokens": (8, 120, 1, 100),
}
PATHS = ("dense", "cache", "packed")
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def make_batch(num_prompts: int, prompt: int, group: int, completion: int, vocab: int, ragged: bool) -> Batch:
    """Random tokens. Ragged: lengths spread evenly from half to the full length."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int, shortest: float) -> list[int]:
        if ragged:
            length = int(torch.randint(int(shortest * length), length + 1, (), generator=generator))
        return torch.randint(3, vocab, (length,), generator=generator).tolist()

    return collate(
        [Example(tokens(prompt, 0.5), [tokens(completion, 0.5) for _ in range(group)]) for _ in range(num_prompts)]
    )


def seconds(policy: nn.Module, batch: Batch, path: str, clock: Clock) -> tuple[float, float]:
    """(forward, backward) of the mean log-prob."""
    policy.zero_grad(set_to_none=True)
    start = clock()
    with torch.autocast("cpu", torch.bfloat16):
        scores = completion_logprobs(policy, batch, path=path)
    middle = clock()
    scores.logprobs.mean().backward()
    return middle - start, clock() - middle


def measure(policy: nn.Module, batch: Batch, rounds: int, clock: Clock) -> dict[str, Any]:
    for path in PATHS:
        seconds(policy, batch, path, clock)
    times = [{path: seconds(policy, batch, path, clock) for path in PATHS} for _ in range(rounds)]
    total = [{path: sum(taken) for path, taken in row.items()} for row in times]
    return {
        "seconds": {path: statistics.median(row[path] for row in total) for path in PATHS},
        "forward_seconds": {path: statistics.median(row[path][0] for row in times) for path in PATHS},
        "speed_up_over_dense": {path: statistics.median(row["dense"] / row[path] for row in total) for path in PATHS},
        "rounds": total,
    }


def hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "platform": platform.platform()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ragged", action="store_true", help="lengths from half to the full length")
    parser.add_argument("--output", type=Path, default=None, help="write the figures there, as JSON")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    source = SmolLM2(adapter="lora", lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"})
    source.compact_for("bf16-mixed")
    policy = source.policy()
    vocab = len(source.tokenizer)
    report = {
        "command": f"python {' '.join(sys.argv)}",
        "clock": arguments.clock,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "shapes": {},
    }
    print(
        f"{f'forward + backward, {arguments.clock} seconds':36s}"
        + "".join(f"{path:>10s}" for path in PATHS)
        + "   packed vs dense"
    )
    for name, shape in SHAPES.items():
        batch = make_batch(*shape, vocab, arguments.ragged)
        result = measure(policy, batch, arguments.rounds, CLOCKS[arguments.clock])
        report["shapes"][name] = result
        row = "".join(f"{result['seconds'][path]:10.2f}" for path in PATHS)
        print(f"{name:36s}{row}   {result['speed_up_over_dense']['packed']:.2f}x", flush=True)
    print(report["hardware"])
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
