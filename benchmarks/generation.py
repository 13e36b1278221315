"""Tokens per second of sampling SmolLM2-135M: the engine of rollout=hf against transformers' `generate`, in one run.

    python benchmarks/generation.py --prompts 64 --rounds 3 --output benchmarks/generation.json

A LoRA policy (r=16, all linear layers, adapter with an effect) under bf16 autocast, as `trainer.precision=bf16-mixed`
trains it; temperature 1, nothing truncated. A quarter of the prompts each ask for a number, a name, a sentence and a
story, so that completions end after 3 tokens to never. Methods alternate within each round, so that a machine that
slows down slows all of them; tokens count up to and including the stop token, and the engine's time includes the
merging of the adapter (`sync`).

    engine            rollout=hf as it is configured
    generate          policy.generate, all rows in one call
    generate_chunks   policy.generate, as many rows at a time as the engine's max_batch
    generate_merged   generate on the engine's merged bf16 copy, all rows in one call: what it can do at best
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from alignment.batch import pad  # noqa: E402
from alignment.model.smollm2 import SmolLM2  # noqa: E402
from alignment.rollout.hf import HFEngine  # noqa: E402

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
METHODS = ("engine", "generate", "generate_chunks", "generate_merged")
TOPICS = ("rivers", "bread", "volcanoes", "chess", "the moon", "bicycles", "honey", "trains", "glass", "winter")


def questions(number: int) -> list[str]:
    """Answers of about 3, 10, 40 and 300 tokens in turn; one in two after a preamble, so that prompts differ too."""
    draw = random.Random(0)
    asked = []
    for i in range(number):
        topic = draw.choice(TOPICS)
        question = (
            f"What is {draw.randint(1, 9)} + {draw.randint(1, 9)}? Reply with the number only.",
            f"Name one person or place known for {topic}. Reply with the name only.",
            f"Explain in one short sentence why people care about {topic}.",
            f"Write a long story about {topic}, with many details.",
        )[i % 4]
        preamble = f"We talked about {', '.join(draw.sample(TOPICS, 8))} before. Now something else. " * (i // 4 % 2)
        asked.append(preamble + question)
    return asked


def make_prompts(source: SmolLM2, number: int) -> list[list[int]]:
    turns = [[{"role": "user", "content": text}] for text in questions(number)]
    return source.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)  # pyright: ignore


class Methods:
    """Each returns the lengths of the completions it sampled."""

    def __init__(self, source: SmolLM2, policy: Any, prompts: list[list[int]], arguments: argparse.Namespace) -> None:
        self.source, self.policy, self.prompts, self.arguments = source, policy, prompts, arguments
        self.modelling = {"stop_ids": source.stop_ids, "pad_id": source.tokenizer.pad_token_id}
        self.engine = HFEngine(max_new_tokens=arguments.max_new_tokens, max_batch=arguments.max_batch)
        self.sync_seconds: list[float] = []

    def run(self, method: str, seed: int) -> list[int]:
        if method == "engine":
            return self.sample(seed)
        rows = self.arguments.max_batch // self.arguments.group_size if method == "generate_chunks" else None
        model = self.engine._copy.model if method == "generate_merged" else self.policy  # pyright: ignore
        return self.generate(model, rows or len(self.prompts), seed)

    def sample(self, seed: int) -> list[int]:
        start = time.perf_counter()
        self.engine.sync(self.policy)
        self.sync_seconds.append(time.perf_counter() - start)
        group_size = self.arguments.group_size
        done = self.engine.generate(self.policy, self.prompts, group_size=group_size, seed=seed, **self.modelling)
        return [len(ids) for ids in done.ids]

    def generate(self, model: Any, prompts_at_a_time: int, seed: int) -> list[int]:
        torch.manual_seed(seed)
        model.eval()
        lengths = []
        for start in range(0, len(self.prompts), prompts_at_a_time):
            ids, mask = pad(self.prompts[start : start + prompts_at_a_time], left=True)
            out = model.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=self.arguments.group_size,
                max_new_tokens=self.arguments.max_new_tokens,
                eos_token_id=sorted(self.modelling["stop_ids"]),
                pad_token_id=self.modelling["pad_id"],
            )
            lengths += [self.length(row) for row in out[:, ids.shape[1] :].tolist()]
        return lengths

    def length(self, row: list[int]) -> int:
        return next((i + 1 for i, token in enumerate(row) if token in self.modelling["stop_ids"]), len(row))


def measure(methods: Methods, chosen: list[str], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    taken: dict[str, list[dict[str, Any]]] = {method: [] for method in chosen}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        methods.sample(seed=-1)  # makes the copy and warms up
        methods.sync_seconds.clear()
        for number in range(rounds):
            for method in chosen:
                start = clock()
                lengths = methods.run(method, number)
                seconds = clock() - start
                taken[method].append(
                    {
                        "seconds": seconds,
                        "tokens": sum(lengths),
                        "tokens_per_second": sum(lengths) / seconds,
                        "length_deciles": statistics.quantiles(lengths, n=10),
                    }
                )
                print(f"  round {number} {method:16s} {sum(lengths)} tokens, {seconds:.1f} s", flush=True)
    return taken


def summary(taken: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds; the speed-up is the median of each round's own ratio."""
    result = {}
    for method, rounds in taken.items():
        result[method] = {"tokens_per_second": statistics.median(r["tokens_per_second"] for r in rounds)}
        if "engine" in taken:
            pairs = zip(taken["engine"], rounds, strict=True)
            ratios = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs]
            result[method]["engine_is_faster_by"] = statistics.median(ratios)
    return result


def hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "platform": platform.platform(),
    }


def make_policy(source: SmolLM2) -> nn.Module:
    torch.manual_seed(0)
    policy = source.policy()
    with torch.no_grad():  # B starts at zero: a small effect, as after some training
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    return policy


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for machines that others use as well")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=None, help="write the figures there, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    source = SmolLM2(adapter="lora", lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"})
    source.compact_for("bf16-mixed")
    prompts = make_prompts(source, arguments.prompts)
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens", flush=True)
    methods = Methods(source, make_policy(source), prompts, arguments)
    taken = measure(methods, arguments.methods, arguments.rounds, CLOCKS[arguments.clock])
    result = summary(taken)
    print(f"\n{'':18s}{'tokens/s':>10s}{'engine is faster by':>22s}")
    for method, figures in result.items():
        print(f"{method:18s}{figures['tokens_per_second']:10.0f}{figures.get('engine_is_faster_by', 1.0):21.2f}x")
    report = {
        "command": f"python {' '.join(sys.argv)}",
        "date": time.strftime("%Y-%m-%d"),
        "clock": arguments.clock,
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {k: v for k, v in vars(arguments).items() if k != "output"},
        "summary": result,
        "sync_seconds": statistics.median(methods.sync_seconds) if methods.sync_seconds else None,
        "rounds": taken,
    }
    print(report["hardware"])
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
