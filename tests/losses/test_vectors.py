"""Every published vector is compared somewhere in this folder, or belongs to another part, named here."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from alignment.model.head import head_scores

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent / "data" / "vectors.json"
# The planner's: bytes, not tensors.
ELSEWHERE = {
    "memory_weights_only_7B_bf16",
    "memory_bytes_per_param",
    "memory_zero_stages",
    "memory_fsdp_7B_8ranks",
    "memory_llama2_7b_lora_qlora",
    "memory_logits",
    "memory_kv_cache",
    "memory_activations",
    "memory_ledger_full_finetune_7B_8gpu",
}


def whole_vectors(path: Path) -> set[str]:
    """Names in `vector("name")` calls of a file, without those marked partly=True."""
    return {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "vector"
        and not node.keywords
        and isinstance(node.args[0], ast.Constant)
    }


def test_every_vector_is_compared_or_is_another_part() -> None:
    names = {entry["name"] for entry in json.loads(VECTORS.read_text())}
    compared = set().union(*(whole_vectors(path) for path in HERE.glob("test_*.py")))
    assert names - compared - ELSEWHERE == set()
    assert compared - names == set()
    assert names >= ELSEWHERE
    assert not compared & ELSEWHERE


def test_token_stats_from_logits(vector: Callable) -> None:
    """Through the vocabulary head with the identity as its weight, so that hidden states are logits."""
    for name, v in (
        ("t1", vector("token_stats_from_logits")),
        ("t0.7", vector("token_stats_from_logits_temperature")),
    ):
        logits, labels = v["logits"][0], v["input_ids"][0, 1:].long()
        head = nn.Linear(4, 4, bias=False).double()
        with torch.no_grad():
            head.weight.copy_(torch.eye(4))
        scaled = logits / v.params["temperature"]
        found = head_scores(scaled, head, labels, stats=("entropy", "log_sum_sq_probs", "is_top1"))
        v.check("logps", found["logprobs"][None])
        v.check("entropy", found["entropy"][None])
        if name == "t1":
            v.check("log_sum_sq_probs", found["log_sum_sq_probs"][None])
            v.check("is_top1", found["is_top1"][None])
            v.leave("mean_logits")
