"""The engine against a stub that speaks vLLM's JSON and samples with the tiny model; and against a real server."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file

from alignment import json_client
from alignment.errors import UserError
from alignment.model.adapters import adapter_off, use_adapter
from alignment.model.smollm2 import SmolLM2
from alignment.rollout.hf import HFEngine
from alignment.rollout.vllm import VLLMEngine

STOPS = frozenset({2, 7, 11})
PROMPTS = [[5, 6, 8], [9, 10, 12, 13, 14, 15], [3]]
LORA = {"r": 4, "target_modules": "all-linear"}


class Stub:
    """A server with one base model. What is set on it changes how it answers; what it was asked is in `asked`."""

    def __init__(self, base: Any) -> None:
        self.model = get_peft_model(base, LoraConfig(**LORA))
        self.adapters: dict[str, dict] = {}
        self.loaded: list[str] = []
        self.asked: list[tuple[str, dict]] = []
        self.processed, self.takes_weights, self.num_resets = False, False, 0
        self.loads_adapters = True
        self.fails = 0  # next so many requests end with 500
        self.slow = 0.0
        self.change: Any = lambda reply: reply
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict | None) -> tuple[int, Any]:
        if body is None:
            cards = [{"id": name, "parent": "base"} for name in self.adapters]
            return 200, {"data": [*cards, {"id": "base", "parent": None, "max_model_len": 40}]}
        if path == "/v1/completions":
            return self.complete(body)
        if path in ("/collective_rpc", "/reset_prefix_cache"):
            return self.replace(path, body) if self.takes_weights else (404, {"detail": "Not Found"})
        if not self.loads_adapters:
            return 404, {"detail": "Not Found"}
        if "lora_name" not in body:
            return 400, {"error": {"message": "lora_name: Field required"}}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
            self.adapters[body["lora_name"]] = load_peft_weights(body["lora_path"], device="cpu")
            self.loaded.append(body["lora_name"])
        else:
            del self.adapters[body["lora_name"]]
        return 200, "done"

    def replace(self, path: str, body: dict) -> tuple[int, Any]:
        if path == "/reset_prefix_cache":
            self.num_resets += 1
        elif body.get("method") != "reload_weights":
            return 400, {"detail": "Missing 'method' in request body"}
        else:
            weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            self.model.get_base_model().load_state_dict(self.renamed(weights), strict=False)
        return 200, {"results": [None]}

    def renamed(self, weights: dict) -> dict:
        """Under the names that PEFT gives the layers below its adapters."""
        known = self.model.get_base_model().state_dict()
        return {k if k in known else k.replace(".weight", ".base_layer.weight"): v for k, v in weights.items()}

    @torch.no_grad()
    def complete(self, body: dict) -> tuple[int, Any]:
        name = body["model"]
        if name not in ("base", *self.adapters):
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        if name != "base":
            set_peft_model_state_dict(self.model, self.adapters[name])
        if name == "base":
            with adapter_off(self.model):
                choices = [self.sample(body, i) for i in range(body["n"])]
        else:
            choices = [self.sample(body, i) for i in range(body["n"])]
        return 200, self.change({"model": name, "choices": choices[::-1]})

    def sample(self, body: dict, index: int) -> dict:
        generator = torch.Generator().manual_seed(body["seed"] + index)
        ids, logprobs = list(body["prompt"]), []
        while True:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].double()
            drawn = logits / (body["temperature"] or 1.0)
            if body["top_k"]:
                drawn[drawn < drawn.topk(body["top_k"]).values[-1]] = -torch.inf
            greedy = body["temperature"] == 0
            token = int(drawn.argmax() if greedy else torch.multinomial(drawn.softmax(-1), 1, generator=generator))
            ids.append(token)
            logprobs.append(float((drawn if self.processed else logits).log_softmax(-1)[token]))
            ended = token in body["stop_token_ids"]
            if ended or len(logprobs) == body["max_tokens"]:
                break
        reason = "stop" if ended else "length"
        ids = ids[len(body["prompt"]) :]
        return {
            "index": index,
            "token_ids": ids,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": reason,
        }


@pytest.fixture
def stub(tiny_llama, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(json_client, "FIRST_PAUSE", 0.01)
    server_state = Stub(tiny_llama.eval())

    class Handler(BaseHTTPRequestHandler):
        def respond(self, body: dict | None) -> None:
            with server_state.lock:
                if body is not None:
                    server_state.asked.append((self.path, body))
                time.sleep(server_state.slow)
                failing, server_state.fails = server_state.fails > 0, max(0, server_state.fails - 1)
                status, value = (
                    (500, {"error": {"message": "dead"}}) if failing else server_state.answer(self.path, body)
                )
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.respond(None)

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    server_state.url, server_state.stop = f"http://127.0.0.1:{server.server_port}", stop
    yield server_state
    if thread.is_alive():
        stop()


@pytest.fixture
def policy(stub: Any, tiny_llama) -> PeftModel:
    """The stub's base in a module of its own, with an adapter that does something."""
    base = copy.deepcopy(stub.model).unload()
    policy = get_peft_model(base, LoraConfig(**LORA))
    shift(policy)
    return policy.train()


def shift(policy: Any) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))


def engine(stub: Any, folder: Path, **options: Any) -> VLLMEngine:
    return VLLMEngine(url=stub.url, output_dir=str(folder), **{"max_new_tokens": 12, **options})


def sampled(engine: Any, policy: Any, **options: Any):
    defaults = {"group_size": 3, "stop_ids": STOPS, "pad_id": 0, "seed": 1}
    return engine.generate(policy, PROMPTS, **{**defaults, **options})


# ---- what is sampled ------------------------------------------------------------------------------------------------
def test_greedy_equals_the_engine_in_process_and_again_after_a_change(stub: Any, policy: Any, tmp_path: Path) -> None:
    ours, theirs, seen = engine(stub, tmp_path), HFEngine(max_new_tokens=12, dtype="policy"), []
    for _ in range(2):
        ours.sync(policy)
        one, other = sampled(ours, policy, temperature=0.0), sampled(theirs, policy, temperature=0.0)
        assert one.ids == other.ids and one.finished == other.finished
        for x, y in zip(one.logprobs, other.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-5, atol=1e-5)
        seen.append(one.ids)
        shift(policy)
    assert seen[0] != seen[1] and policy.training
    first, second = stub.loaded
    assert first != second and list(stub.adapters) == [second]
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == [second]


def test_completions_are_ordered_differ_and_carry_the_policys_logprobs(stub: Any, policy: Any, tmp_path: Path) -> None:
    found = sampled(engine(stub, tmp_path), policy)
    assert len(found.ids) == 9
    for n, (ids, logprobs, finished) in enumerate(zip(found.ids, found.logprobs, found.finished, strict=True)):
        assert finished == (ids[-1] in STOPS) and not STOPS & set(ids[:-1])
        prompt = PROMPTS[n // 3]
        with torch.no_grad():
            scores = policy.eval()(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        expected = [float(scores[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert any(found.finished) and len({tuple(ids) for ids in found.ids}) > 6
    assert sampled(engine(stub, tmp_path), policy).ids == found.ids  # this stub repeats exactly
    assert sampled(engine(stub, tmp_path), policy, seed=2).ids != found.ids
    seeds = [body["seed"] for path, body in stub.asked if body.get("n") == 3]
    assert len(set(seeds)) == 6 and max(seeds) < 2**62


def test_every_request_says_all_its_settings(stub: Any, policy: Any, tmp_path: Path) -> None:
    """Those of 0.32's `default_sampling_params`, which come from a generation config, and the EOS that it adds."""
    sampled(engine(stub, tmp_path, top_k=0), policy)
    _, body = stub.asked[-1]
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 12}
    assert settings.items() <= body.items()
    assert body["ignore_eos"] is True and body["stop_token_ids"] == sorted(STOPS)


def test_the_base_answers_where_the_adapter_is_off(stub: Any, policy: Any, tmp_path: Path) -> None:
    ours, theirs = engine(stub, tmp_path), HFEngine(max_new_tokens=12, dtype="policy")
    ours.sync(policy)
    on = sampled(ours, policy, temperature=0.0).ids
    with adapter_off(policy):
        off = sampled(ours, policy, temperature=0.0).ids
        assert off == sampled(theirs, policy, temperature=0.0).ids
    assert on != off
    policy.add_adapter("reference", LoraConfig(**LORA))
    with use_adapter(policy, "reference"), pytest.raises(UserError, match="own adapter only: type rollout=hf"):
        sampled(ours, policy)


# ---- log-probs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("processed", "options", "hint"),
    [
        (False, {"temperature": 0.7}, "--logprobs-mode processed_logprobs"),
        (True, {"top_k": 5}, "--logprobs-mode raw_logprobs"),
        (True, {"temperature": 0.7, "top_k": 5}, "rollout.top_p=1.0 rollout.top_k=0"),
        (True, {"temperature": 0.7}, None),
        (True, {"temperature": 0.0, "top_k": 5}, None),
        (True, {}, None),
        (False, {"top_k": 5}, None),
    ],
)
def test_logprobs_are_of_the_scaled_whole_distribution_or_refused(
    stub: Any, policy: Any, tmp_path: Path, processed: bool, options: dict, hint: str | None
) -> None:
    stub.processed = processed
    ours = engine(stub, tmp_path)
    if hint is not None:
        with pytest.raises(UserError, match=hint):
            sampled(ours, policy, **options)
        return
    found, scale = sampled(ours, policy, **options), options.get("temperature") or 1.0
    with torch.no_grad():
        scores = (policy.eval()(input_ids=torch.tensor([PROMPTS[0] + found.ids[0]])).logits[0] / scale).log_softmax(-1)
    expected = [float(scores[2 + i, token]) for i, token in enumerate(found.ids[0])]
    if not (processed and options.get("temperature") == 0.0):  # the stub truncates greedy ones as vLLM does not
        torch.testing.assert_close(torch.tensor(found.logprobs[0]), torch.tensor(expected), rtol=1e-5, atol=1e-5)


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_no_server_is_refused_at_once_with_what_to_type(stub: Any, tmp_path: Path) -> None:
    stub.stop()
    with pytest.raises(UserError, match=r"no vLLM server answers .*refused.*2 tries.* type rollout=hf"):
        engine(stub, tmp_path, num_tries=2)
    stub.url = "localhost"
    with pytest.raises(UserError, match="unknown url type"):
        engine(stub, tmp_path)


def test_a_server_without_adapters_is_refused(stub: Any, tmp_path: Path) -> None:
    stub.loads_adapters = False
    with pytest.raises(UserError, match="loads no adapters: start it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "):
        engine(stub, tmp_path)


def test_another_base_model_is_noticed(stub: Any, policy: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(-30)
    with pytest.raises(UserError, match=r"it serves base\) are .* nats per token from the policy's"):
        engine(stub, tmp_path).sync(policy)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_server_that_dies_ends_the_run_with_how_to_go_on(
    stub: Any, policy: Any, tmp_path: Path, checkpoint: bool
) -> None:
    ours = engine(stub, tmp_path, num_tries=2)
    ours.sync(policy)
    stub.stop()
    if checkpoint:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "00000005.ckpt").touch()
    then = f"resume={tmp_path}" if checkpoint else "command of this run again"
    with pytest.raises(UserError, match=f"no longer answers .*start it again, then .*{then}"):
        sampled(ours, policy)


def test_short_faults_are_tried_again_and_a_hang_is_not(stub: Any, policy: Any, tmp_path: Path) -> None:
    ours = engine(stub, tmp_path, num_tries=3)
    ours.sync(policy)
    stub.fails = 2
    assert len(sampled(ours, policy).ids) == 9
    stub.fails = 100
    with pytest.raises(UserError, match="HTTP 500: dead; 3 tries"):
        sampled(ours, policy)
    stub.fails, stub.slow = 0, 1.0
    hasty = engine(stub, tmp_path, timeout=3.0)
    hasty._client.timeout, before = 0.2, len(stub.asked)
    with pytest.raises(UserError, match=r"no answer within 0\.2 s"):
        hasty.sync(policy)
    assert len(stub.asked) == before + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: reply | {"model": "policy-old-1"}, "answered with weights policy-old-1 where policy-"),
        (lambda reply: "busy", "answered with weights None"),
        (lambda reply: reply | {"choices": None}, "gives no token ids with their log-probs"),
        (lambda reply: reply | {"choices": reply["choices"][1:]}, "gives no token ids with their log-probs"),
        (
            lambda reply: reply | {"choices": [c | {"logprobs": None} for c in reply["choices"]]},
            "gives no token ids with their log-probs",
        ),
        (
            lambda reply: (
                reply
                | {
                    "choices": [
                        c | {"token_ids": [4], "logprobs": {"token_logprobs": [-1.0]}} for c in reply["choices"]
                    ]
                }
            ),
            "ended a completion after 1 tokens .* --generation-config vllm",
        ),
        (
            lambda reply: (
                reply
                | {
                    "choices": [
                        c | {"token_ids": [2], "logprobs": {"token_logprobs": [float("nan")]}} for c in reply["choices"]
                    ]
                }
            ),
            "not finite",
        ),
    ],
)
def test_replies_that_are_not_what_was_asked_for(
    stub: Any, policy: Any, tmp_path: Path, change: Any, message: str
) -> None:
    ours = engine(stub, tmp_path)
    ours.sync(policy)
    stub.change = change
    with pytest.raises(UserError, match=message):
        sampled(ours, policy)


def test_without_adapter_and_too_long(stub: Any, policy: Any, tiny_llama, tmp_path: Path) -> None:
    ours = engine(stub, tmp_path)
    with pytest.raises(UserError, match=r"type rollout\.adapter=none"):
        ours.sync(tiny_llama)
    with pytest.raises(UserError, match="the model has 40 positions"):
        sampled(ours, policy, max_new_tokens=60)


def test_a_frozen_model_without_adapter_is_the_servers_base(stub: Any, policy: Any, tmp_path: Path) -> None:
    """As the tasks that learn nothing have it, which say their number format themselves."""
    base = policy.unload().requires_grad_(False).eval()
    ours = engine(stub, tmp_path)
    ours.sync(base, torch.bfloat16)
    theirs = HFEngine(max_new_tokens=12, dtype="policy")
    assert sampled(ours, base, temperature=0.0).ids == sampled(theirs, base, temperature=0.0).ids
    assert stub.loaded == []


def test_an_adapter_whose_first_try_arrived_unanswered_counts_as_loaded(stub: Any, policy: Any, tmp_path: Path) -> None:
    answer = stub.answer

    def lose_the_first(path: str, body: dict | None) -> tuple[int, Any]:
        reply = answer(path, body)
        first = path == "/v1/load_lora_adapter" and reply[0] == 200
        return (502, {"error": {"message": "gateway"}}) if first else reply

    ours = engine(stub, tmp_path)
    stub.answer = lose_the_first
    ours.sync(policy)
    assert len(stub.loaded) == 1
    assert len(sampled(ours, policy).ids) == 9


def test_a_server_that_was_restarted_says_how_to_go_on(stub: Any, policy: Any, tmp_path: Path) -> None:
    ours = engine(stub, tmp_path)
    ours.sync(policy)
    stub.adapters.clear()
    with pytest.raises(UserError, match=r"no longer has the weights policy-.*restart: type the command of this run"):
        sampled(ours, policy)


def test_all_weights_are_sent_where_all_are_trained(stub: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"takes no weights: start it with `VLLM_SERVER_DEV_MODE=1"):
        engine(stub, tmp_path, adapter="none")
    stub.takes_weights, stub.loads_adapters = True, False
    policy = copy.deepcopy(stub.model).unload().requires_grad_(True).train()
    ours, theirs, seen = engine(stub, tmp_path, adapter="none"), HFEngine(max_new_tokens=12, dtype="policy"), []
    for number in range(1, 3):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        ours.sync(policy)
        one, other = sampled(ours, policy, temperature=0.0), sampled(theirs, policy, temperature=0.0)
        assert one.ids == other.ids
        seen.append(one.ids)
        assert stub.num_resets == number  # cached prompts are of former weights
    assert seen[0] != seen[1] and policy.training
    assert not list((tmp_path / "vllm").iterdir())  # what the server has read is not kept
    with torch.no_grad():
        next(policy.parameters()).add_(0.1)
    sampled(ours, policy)  # it is seen that the weights are others, without `sync`
    assert stub.num_resets == 3
    with pytest.raises(UserError, match=r"not this model's"):
        sampled(ours, copy.deepcopy(policy).requires_grad_(False))


# ---- a real server ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_real_server_serves_what_is_trained(tmp_path: Path, adapter: Any) -> None:
    """SmolLM2 in float32 (docs/rollout.md): greedy tokens as of `hf`, before and after an update; log-probs of both.

    The server is that of ALIGNMENT_VLLM_URL; without it this test has nothing to ask, and fails saying so.
    """
    url = os.environ.get("ALIGNMENT_VLLM_URL")
    assert url, "start a server as docs/rollout.md says, and set ALIGNMENT_VLLM_URL to its address"
    source = SmolLM2(adapter=adapter, lora={"r": 16, "target_modules": "all-linear"})
    torch.manual_seed(0)
    policy: Any = source.policy()
    served, local = (
        VLLMEngine(url=url, adapter=adapter, output_dir=str(tmp_path), max_new_tokens=24),
        HFEngine(max_new_tokens=24),
    )
    ask = [[{"role": "user", "content": f"Name {n} things that are found in a kitchen."}] for n in range(2, 66)]
    prompts = [source.tokenizer.apply_chat_template(a, add_generation_prompt=True, return_dict=False) for a in ask]
    options: dict[str, Any] = {"group_size": 1, "stop_ids": source.stop_ids, "pad_id": 0, "seed": 0}
    found = []
    for _ in range(2):
        served.sync(policy)
        local.sync(policy)
        ours, theirs = (e.generate(policy, prompts, temperature=0.0, **options) for e in (served, local))
        same = sum(a == b for a, b in zip(ours.ids, theirs.ids, strict=True))
        gaps = [
            abs(x - y)
            for a, b, p, q in zip(ours.ids, theirs.ids, ours.logprobs, theirs.logprobs, strict=True)
            if a == b
            for x, y in zip(p, q, strict=True)
        ]
        print(f"{same} of 64 completions have the same tokens; log-probs differ by {sum(gaps) / len(gaps):.2g} nats")
        assert same >= 61  # 95 %
        assert sum(gaps) / len(gaps) < 1e-3
        found.append(theirs.ids)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if adapter == "none":
                    parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
                elif "lora_B" in name:
                    parameter.add_(1e-2 * torch.randn_like(parameter))
    assert sum(a != b for a, b in zip(*found, strict=True)) > 6  # the update changed what is said
