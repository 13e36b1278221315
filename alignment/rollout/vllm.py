"""Sampling by a vLLM server that runs beside this process and is sent what is trained after every change of it."""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import shutil
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from alignment.errors import UserError
from alignment.json_client import JSONClient, Reply, Unreachable
from alignment.model.adapters import POLICY
from alignment.rollout.decoding import Settings
from alignment.rollout.hf import Completions, check_request, evaluating, state_of

START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve <model folder> --enable-lora --max-lora-rank <model.lora.r> "
    "--generation-config vllm"
)
START_WHOLE = "VLLM_SERVER_DEV_MODE=1 vllm serve <model folder> --generation-config vllm"
PROBE_TOKENS = 16
# Mean difference in nats per token at which the server's model is no rounding of the policy: bfloat16 gives about 0.02.
MAX_GAP = 1.0
_log = logging.getLogger(__name__)


class VLLMEngine:
    """The interface of HFEngine, with a running vLLM server (0.32) as the sampler.

    `sync` writes the adapter into a folder and has the server load it under a name of its own per version; every reply
    must name it. Where all weights are trained, `sync` writes them all and has the server read them in place of its
    own: such a server serves this run alone, and keeps its last weights. What it does otherwise is the base model's
    folder, its number format, and nothing of its generation config: every request says all of its settings.

    url: of the server. adapter: what is trained, as model.adapter says: "lora", or "none" for all weights.
    output_dir: the run's folder, which the server must be able to read under the same path. timeout: seconds for one
    request (a group of completions). num_tries: of a request that breaks off. max_requests: prompts that are with the
    server at a time.

    Making one asks the server who it is. Raises UserError where nothing answers, or where it cannot load adapters.
    """

    other_process: ClassVar[bool] = True

    def __init__(
        self,
        *,
        url: str,
        adapter: Literal["lora", "none"] = "lora",
        output_dir: str,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        timeout: float = 600.0,
        num_tries: int = 4,
        max_requests: int = 64,
    ) -> None:
        self.max_new_tokens, self.temperature, self.top_p, self.top_k = max_new_tokens, temperature, top_p, top_k
        self.url, self.output_dir, self.max_requests = url, Path(output_dir), max_requests
        self.adapter, self._start = adapter, START if adapter == "lora" else START_WHOLE
        self._client = self._client_of(timeout=timeout, num_tries=num_tries)
        self._run, self._version = uuid.uuid4().hex[:8], 0
        self._synced: weakref.ref[nn.Module] | None = None
        self._state: object = None
        self._adapter: str | None = None  # its name on the server
        self._processed: bool | None = None  # whether the server's log-probs are those after temperature and truncation
        self._meet()

    def _client_of(self, *, timeout: float, num_tries: int) -> JSONClient:
        return JSONClient(self.url, timeout=timeout, num_tries=num_tries, key_variable="VLLM_API_KEY")

    # ---- the server -------------------------------------------------------------------------------------------------
    def _meet(self) -> None:
        """Before anything heavy happens: is it there, what does it serve, does it load adapters."""
        client = self._client_of(timeout=min(30.0, self._client.timeout), num_tries=self._client.num_tries)
        try:
            models = client.get("/v1/models")
            # Without what they need: 400 where the route exists, 404 where the server was started without it.
            route = client.post("/v1/load_lora_adapter" if self.adapter == "lora" else "/collective_rpc", {})
        except (Unreachable, ValueError) as error:  # ValueError: no URL at all
            raise UserError(
                f"rollout.url: no vLLM server answers at {self.url} ({error}): start one with `{self._start}` and type "
                "rollout.url=http://<host>:8000, or type rollout=hf"
            ) from error
        cards = [card for card in _cards(models) if not card.get("parent")]
        if not cards:
            raise UserError(
                f"rollout.url: {self.url} is no vLLM server that lets us in (HTTP {models.status}: {models.text}): "
                "type rollout.url=<its address>, and put its key into the environment variable VLLM_API_KEY"
            )
        if route.status in (404, 405):
            what = "loads no adapters" if self.adapter == "lora" else "takes no weights"
            raise UserError(f"rollout.url: the server at {self.url} {what}: start it with `{self._start}`")
        self.base, self.max_model_len = cards[0]["id"], cards[0].get("max_model_len")

    def _post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """A reply, whatever its status; UserError where the server is gone in the middle of the run."""
        try:
            return self._client.post(path, body)
        except Unreachable as error:
            raise UserError(
                f"rollout.url: the vLLM server at {self.url} no longer answers ({error}): start it again, then "
                f"{self._go_on()}"
            ) from error

    def _go_on(self) -> str:
        if any((self.output_dir / "checkpoints").glob("*.ckpt")):
            return f"go on from the last checkpoint: type python run.py resume={self.output_dir}"
        return "type the command of this run again (there is no checkpoint yet, see checkpoint.every)"

    def _refused(self, what: str, reply: Reply) -> NoReturn:
        raise UserError(f"rollout.url: the vLLM server at {self.url} {what} (HTTP {reply.status}: {reply.text})")

    # ---- weights ----------------------------------------------------------------------------------------------------
    def sync(self, policy: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        """Have the server load the policy's adapter, and drop the former one. One process does it for all ranks.

        compute_dtype: the number format of training, under which the policy is compared with the server; None =
        autocast's, where it is on. A model that trains nothing is the server's base already.
        """
        if hasattr(policy, "get_base_model"):  # peft marks a base with `peft_config` too
            former, self._version = self._adapter, self._version + 1
            self._adapter = _on_rank_zero(lambda: self._load(policy, f"policy-{self._run}-{self._version}", former))
            if self._version == 1 and _rank() == 0:
                atexit.register(self._close)
        elif any(parameter.requires_grad for parameter in policy.parameters()):
            if self.adapter == "lora":
                raise UserError("rollout.adapter: all weights of this model are trained: type rollout.adapter=none")
            self._version += 1
            _on_rank_zero(lambda: self._replace(policy, f"weights-{self._run}-{self._version}"))
        elif self.adapter == "none" and self._version:
            raise UserError("rollout=vllm: the server has the policy's weights now, not this model's: type rollout=hf")
        self._synced, self._state = weakref.ref(policy), state_of(policy)
        self._compare(policy, self._name_for(policy), compute_dtype)

    def _replace(self, policy: Any, name: str) -> str:
        """Have the server read all weights anew; what it has cached of prompts is of the former ones."""
        folder = self._folder(name)
        policy.save_pretrained(folder)
        reading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        for path, body in (("/collective_rpc", reading), ("/reset_prefix_cache", {})):
            reply = self._post(path, body)
            if not reply.ok:
                self._refused(f"does not take the weights in {folder}; it must see that folder", reply)
        shutil.rmtree(folder)
        return name

    def _load(self, policy: Any, name: str, former: str | None) -> str:
        folder = self._folder(name)
        policy.save_pretrained(folder, selected_adapters=[POLICY], save_embedding_layers=False)
        reply = self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        # A first try may have arrived though its answer did not: the second is then refused, the name being taken.
        if not reply.ok and name not in self._served():
            self._refused(
                f"does not load the adapter in {folder}; it must see that folder, have --max-lora-rank of at least "
                "model.lora.r, and no settings of model.lora that vLLM lacks: restart it so, or type rollout=hf",
                reply,
            )
        if former is not None:
            self._drop(self._client, former)
        return name

    def _served(self) -> set[str]:
        """Names of all that the server has now; none where it does not say."""
        try:
            return {card["id"] for card in _cards(self._client.get("/v1/models"))}
        except Unreachable:
            return set()

    def _folder(self, name: str) -> Path:
        """Kept for as long as the server may use the adapter: it reads it again when its own memory is short."""
        return (self.output_dir / "vllm" / name).resolve()

    def _drop(self, client: JSONClient, name: str) -> None:
        """An adapter of ours that stays on the server costs it memory and no more: so no error."""
        try:
            reply = client.post("/v1/unload_lora_adapter", {"lora_name": name})
            if not reply.ok:
                _log.warning("the vLLM server at %s keeps adapter %s: %s", self.url, name, reply.text)
        except Unreachable as error:
            _log.warning("the vLLM server at %s was not told to drop adapter %s: %s", self.url, name, error)
        shutil.rmtree(self._folder(name), ignore_errors=True)

    def _close(self) -> None:
        if self._adapter is not None:
            self._drop(self._client_of(timeout=5, num_tries=1), self._adapter)

    def _name_for(self, policy: nn.Module) -> str:
        """What the server calls the weights that are on in the policy: its adapter, or the base."""
        if self._synced is None or self._synced() is not policy:
            self.sync(policy)
        _, adapters = now = state_of(policy)
        if adapters and all(off for off, _ in adapters):
            return self.base
        if {active for off, active in adapters if not off} - {POLICY, str([POLICY])}:
            raise UserError("rollout=vllm: the server knows the policy's own adapter only: type rollout=hf")
        if self._state != now:
            self.sync(policy)
        return self._adapter or self.base

    def _compare(self, policy: Any, name: str, compute_dtype: torch.dtype | None) -> None:
        """That the weights called `name` answer, and that their log-probs are the policy's up to rounding.

        Of a few tokens that the server samples after an arbitrary prompt. Raises UserError where they are far apart:
        the server then has another base model, or scales the adapter otherwise.
        """
        size, device = policy.get_input_embeddings().weight.shape[0], next(policy.parameters()).device
        prompt = [size * (i + 1) // (PROBE_TOKENS + 2) for i in range(PROBE_TOKENS)]
        ids, logprobs, _ = self._complete(name, _probe(PROBE_TOKENS), prompt, 1, 0)[0]
        short = compute_dtype is not None or torch.is_autocast_enabled(device.type)
        dtype = compute_dtype or torch.get_autocast_dtype(device.type)
        with torch.autocast(device.type, dtype=dtype, enabled=short), evaluating(policy, autocast=True):
            logits = policy(input_ids=torch.tensor([prompt + ids], device=device), use_cache=False).logits
        scores = logits[0, PROBE_TOKENS - 1 : -1].float().log_softmax(-1).cpu()
        ours = scores.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        gap = float((ours - torch.tensor(logprobs)).abs().mean())
        _log.info("%s on the vLLM server: log-probs are %.2g nats per token from the policy's", name, gap)
        if not gap < MAX_GAP:
            raise UserError(
                f"rollout.url: the log-probs of the server at {self.url} (it serves {self.base}) are {gap:.2f} nats "
                "per token from the policy's: start it with the folder of model.path, without quantization, or type "
                "rollout=hf"
            )

    # ---- sampling ---------------------------------------------------------------------------------------------------
    def generate(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        stop_ids: Collection[int],
        pad_id: int,
        seed: int,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> Completions:
        """`group_size` completions of each prompt (lists of token ids). What is None is as in the constructor.

        Seeds are a function of (seed, prompt's number), but the last bits of the server's numbers depend on what it
        computes at the same time: unlike HFEngine's, its samples do not repeat exactly.
        Raises UserError for what HFEngine refuses, a server that is gone, and a reply of other weights.
        """
        settings = Settings(
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
            top_k=self.top_k if top_k is None else top_k,
            stop_ids=frozenset(stop_ids),
            pad_id=pad_id,
            seed=seed,
        )
        check_request(settings, prompts, group_size, self.max_model_len)
        self._check_logprobs(settings, prompts[0][:1])
        name = self._name_for(policy)
        num = 1 if settings.temperature == 0 else group_size  # vLLM refuses several of what is greedy
        pool = ThreadPoolExecutor(self.max_requests)
        try:
            groups = pool.map(lambda i: self._complete(name, settings, prompts[i], num, i), range(len(prompts)))
            rows = [row for group in groups for row in (group if num == group_size else group * group_size)]
        finally:
            pool.shutdown(cancel_futures=True)
        ids, logprobs, finished = (list(column) for column in zip(*rows, strict=True))
        return Completions([list(row) for row in ids], [list(row) for row in logprobs], finished)

    def _complete(
        self, name: str, settings: Settings, prompt: Sequence[int], num: int, index: int
    ) -> list[tuple[list[int], list[float], bool]]:
        """Ids, log-probs and whether it ended by itself, of `num` completions of one prompt."""
        reply = self._post("/v1/completions", _request(name, settings, prompt, num, index))
        if reply.status == 404:
            raise UserError(
                f"rollout.url: the vLLM server at {self.url} no longer has the weights {name} (HTTP 404: {reply.text}),"
                f" as after a restart: {self._go_on()}"
            )
        if not reply.ok:
            self._refused("does not complete a prompt", reply)
        answered, rows = _choices(reply)
        if answered != name:
            self._refused(f"answered with weights {answered} where {name} was asked for", reply)
        if len(rows) != num or not all(ids and probs and len(ids) == len(probs) for ids, probs, _ in rows):
            self._refused("gives no token ids with their log-probs: it has to be vLLM 0.32 or newer", reply)
        found = []
        for ids, logprobs, why in rows:
            ended = ids[-1] in settings.stop_ids
            if not ended and (why != "length" or len(ids) < settings.max_new_tokens):
                self._refused(
                    f"ended a completion after {len(ids)} tokens ({why}) at no stop token and below "
                    f"rollout.max_new_tokens={settings.max_new_tokens}: start it with `{START}`",
                    reply,
                )
            if not all(math.isfinite(x) for x in logprobs):
                raise UserError(f"rollout.url: the vLLM server at {self.url} gave a log-prob that is not finite")
            found.append((ids, logprobs, ended))
        return found

    def _check_logprobs(self, settings: Settings, prompt: Sequence[int]) -> None:
        """The log-probs of HFEngine are under softmax(logits / temperature) of the whole vocabulary.

        A server's are those of the raw logits (the default) or of what it draws from, truncation included. At
        temperature 1 and 0 without truncation both are right. Otherwise only one is, and which one the server gives is
        found by asking: with top_k=1 what is drawn has probability 1, so log-prob 0.
        """
        plain, truncated = settings.temperature in (0, 1), settings.top_k > 0 or settings.top_p < 1
        if settings.temperature == 0 or (plain and not truncated):
            return
        if truncated and not plain:
            raise UserError(
                f"rollout.temperature: vLLM gives no log-probs at temperature {settings.temperature:g} of the whole "
                "vocabulary beside top_p or top_k: type rollout.top_p=1.0 rollout.top_k=0, or rollout=hf"
            )
        if self._processed is None:
            self._processed = self._complete(self.base, _probe(1, top_k=1), prompt, 1, 0)[0][1][0] == 0.0
        wanted = "raw_logprobs" if truncated else "processed_logprobs"
        if self._processed == truncated:
            raise UserError(
                f"rollout.url: with these sampling settings the log-probs of the server at {self.url} are not those "
                f"the trainer computes: start it with --logprobs-mode {wanted}, or type rollout=hf"
            )


def _request(name: str, settings: Settings, prompt: Sequence[int], num: int, index: int) -> dict[str, Any]:
    """All that acts on sampling, so that neither the server's defaults nor a generation config do."""
    return {
        "model": name,
        "prompt": list(prompt),
        "n": num,
        "max_tokens": settings.max_new_tokens,
        "min_tokens": 0,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": _prompt_seed(settings.seed, index),
        # The server's own idea of EOS does not count, ours do; the one that ends a completion is part of it.
        "ignore_eos": True,
        "stop": [],
        "stop_token_ids": sorted(settings.stop_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
    }


def _probe(num_tokens: int, top_k: int = 0) -> Settings:
    return Settings(num_tokens, temperature=1.0, top_k=top_k, top_p=1.0, stop_ids=frozenset(), pad_id=0, seed=0)


def _cards(reply: Reply) -> list[dict[str, Any]]:
    """What /v1/models lists; nothing where the reply is none of vLLM's."""
    found = reply.value.get("data") if reply.ok and isinstance(reply.value, dict) else None
    return [card for card in found if isinstance(card, dict) and "id" in card] if isinstance(found, list) else []


def _choices(reply: Reply) -> tuple[str | None, list[tuple[Any, Any, Any]]]:
    """The weights that answered; ids, log-probs and reason of each completion. What is not there is None."""
    value = reply.value if isinstance(reply.value, dict) else {}
    choices = sorted(value.get("choices") or [], key=lambda choice: choice.get("index", 0))
    rows = [
        (c.get("token_ids"), (c.get("logprobs") or {}).get("token_logprobs"), c.get("finish_reason")) for c in choices
    ]
    return value.get("model"), rows


def _prompt_seed(seed: int, index: int) -> int:
    """62 bits. vLLM gives completion i of a group this plus i, so neighbouring prompts must be far apart."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "big") >> 2


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _on_rank_zero(make: Callable[[], str]) -> str:
    """What rank 0 made, or its error, on every rank: no rank waits for one that has failed."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [make()]
        except UserError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], UserError):
        raise found[0]
    return found[0]
