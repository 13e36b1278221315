"""The papers behind a run, as BibTeX: the one place where they are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paper:
    """One paper; `where` is its arXiv number, or an address."""

    where: str
    title: str
    author: str
    year: int

    @property
    def key(self) -> str:
        """Such as rafailov2023direct: the first author, the year, the title's first word that says something."""
        words = re.findall(r"[A-Za-z0-9]+", self.title.lower())
        first = next(word for word in words if word not in ("a", "an", "the", "on", "of", "is", "your"))
        return re.sub(r"\W", "", self.author.partition(",")[0].lower()) + f"{self.year}{first}"

    @property
    def bibtex(self) -> str:
        fields = {"title": f"{{{self.title}}}", "author": f"{self.author} and others", "year": str(self.year)}
        if re.fullmatch(r"\d{4}\.\d{4,5}", self.where):
            fields |= {"eprint": self.where, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.where}"}
        else:
            fields["url"] = self.where
        lines = [f"  {name:<13} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])


def _paper(where: str, title: str, author: str) -> tuple[str, Paper]:
    return where, Paper(where, title, author, 2000 + int(where[:2]) if where[0].isdigit() else 2023)


CDPO = "https://ericmitchell.ai/cdpo.pdf"
PAPERS: dict[str, Paper] = dict(
    [
        _paper(
            "1506.02438", "High-Dimensional Continuous Control Using Generalized Advantage Estimation", "Schulman, John"
        ),
        _paper("1707.06347", "Proximal Policy Optimization Algorithms", "Schulman, John"),
        _paper("1909.08593", "Fine-Tuning Language Models from Human Preferences", "Ziegler, Daniel M."),
        _paper("2009.01325", "Learning to summarize from human feedback", "Stiennon, Nisan"),
        _paper("2106.09685", "LoRA: Low-Rank Adaptation of Large Language Models", "Hu, Edward J."),
        _paper("2203.02155", "Training language models to follow instructions with human feedback", "Ouyang, Long"),
        _paper("2211.14275", "Solving math word problems with process- and outcome-based feedback", "Uesato, Jonathan"),
        _paper("2304.06767", "RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment", "Dong, Hanze"),
        _paper("2305.10425", "SLiC-HF: Sequence Likelihood Calibration with Human Feedback", "Zhao, Yao"),
        _paper("2305.14314", "QLoRA: Efficient Finetuning of Quantized LLMs", "Dettmers, Tim"),
        _paper(
            "2305.18290",
            "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
            "Rafailov, Rafael",
        ),
        _paper("2305.20050", "Let's Verify Step by Step", "Lightman, Hunter"),
        _paper(
            "2306.13649",
            "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
            "Agarwal, Rishabh",
        ),
        _paper("2309.06657", "Statistical Rejection Sampling Improves Preference Optimization", "Liu, Tianqi"),
        _paper(
            "2309.16240",
            "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
            "Wang, Chaoqi",
        ),
        _paper("2310.05914", "NEFTune: Noisy Embeddings Improve Instruction Finetuning", "Jain, Neel"),
        _paper(
            "2310.10505",
            "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language "
            "Models",
            "Li, Ziniu",
        ),
        _paper(
            "2310.12036",
            "A General Theoretical Paradigm to Understand Learning from Human Preferences",
            "Azar, Mohammad Gheshlaghi",
        ),
        _paper("2311.09528", "HelpSteer: Multi-attribute Helpfulness Dataset for SteerLM", "Wang, Zhilin"),
        _paper("2312.00886", "Nash Learning from Human Feedback", "Munos, R{\\'e}mi"),
        _paper(
            "2401.08417",
            "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
            "Xu, Haoran",
        ),
        _paper("2402.00856", "Towards Efficient Exact Optimization of Language Model Alignment", "Ji, Haozhe"),
        _paper("2402.01306", "KTO: Model Alignment as Prospect Theoretic Optimization", "Ethayarajh, Kawin"),
        _paper(
            "2402.03300",
            "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
            "Shao, Zhihong",
        ),
        _paper("2402.04792", "Direct Language Model Alignment from Online AI Feedback", "Guo, Shangmin"),
        _paper("2402.05369", "Noise Contrastive Alignment of Language Models with Explicit Rewards", "Chen, Huayu"),
        _paper("2402.09353", "DoRA: Weight-Decomposed Low-Rank Adaptation", "Liu, Shih-Yang"),
        _paper(
            "2402.14740",
            "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
            "Ahmadian, Arash",
        ),
        _paper(
            "2403.00409", "Provably Robust DPO: Aligning Language Models with Noisy Feedback", "Chowdhury, Sayak Ray"
        ),
        _paper("2403.07691", "ORPO: Monolithic Preference Optimization without Reference Model", "Hong, Jiwoo"),
        _paper("2404.04656", "Binary Classifier Optimization for Large Language Model Alignment", "Jung, Seungjae"),
        _paper("2404.09656", "Learn Your Reference Model for Real Good Alignment", "Gorbatovski, Alexey"),
        _paper("2404.19733", "Iterative Reasoning Preference Optimization", "Pang, Richard Yuanzhe"),
        _paper("2405.00675", "Self-Play Preference Optimization for Language Model Alignment", "Wu, Yue"),
        _paper("2405.14734", "SimPO: Simple Preference Optimization with a Reference-Free Reward", "Meng, Yu"),
        _paper(
            "2405.16436",
            "Provably Mitigating Overoptimization in RLHF: Your SFT Loss is Implicitly an Adversarial Regularizer",
            "Liu, Zhihan",
        ),
        _paper(
            "2405.16681",
            "Triple Preference Optimization: Achieving Better Alignment using a Single Step Optimization",
            "Saeidi, Amir",
        ),
        _paper(
            "2405.21046",
            "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
            "Xie, Tengyang",
        ),
        _paper("2406.05882", "Distributional Preference Alignment of LLMs via Optimal Transport", "Melnyk, Igor"),
        _paper(
            "2406.08414",
            "Discovering Preference Optimization Algorithms with and for Large Language Models",
            "Lu, Chris",
        ),
        _paper("2406.11827", "WPO: Enhancing RLHF with Weighted Preference Optimization", "Zhou, Wenxuan"),
        _paper(
            "2408.06266",
            "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
            "D'Oosterlinck, Karel",
        ),
        _paper("2409.06411", "Length Desensitization in Direct Preference Optimization", "Liu, Wei"),
        _paper(
            "2411.10442",
            "Enhancing the Reasoning Ability of Multimodal Large Language Models via Mixed Preference Optimization",
            "Wang, Weiyun",
        ),
        _paper("2411.15124", "Tulu 3: Pushing Frontiers in Open Language Model Post-Training", "Lambert, Nathan"),
        _paper(
            "2501.03262", "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", "Hu, Jian"
        ),
        _paper("2501.03884", "AlphaPO: Reward Shape Matters for LLM Alignment", "Gupta, Aman"),
        _paper("2503.14476", "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", "Yu, Qiying"),
        _paper("2503.20783", "Understanding R1-Zero-Like Training: A Critical Perspective", "Liu, Zichen"),
        _paper(
            "2506.01939",
            "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM "
            "Reasoning",
            "Wang, Shenzhi",
        ),
        _paper(
            "2506.13585",
            "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
            "{MiniMax}",
        ),
        _paper("2507.18071", "Group Sequence Policy Optimization", "Zheng, Chujie"),
        _paper("2507.20673", "Geometric-Mean Policy Optimization", "Zhao, Yuzhong"),
        _paper(
            "2508.05629",
            "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
            "Wu, Yongliang",
        ),
        _paper("2508.08221", "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", "Liu, Zihe"),
        _paper("2511.20347", "Soft Adaptive Policy Optimization", "Gao, Chang"),
        _paper(
            "2602.05261",
            "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR",
            "Liu, Fanfan",
        ),
        _paper(
            "2602.10693",
            "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training",
            "Shen, Guobin",
        ),
        _paper(CDPO, "A note on DPO with noisy preferences and relationship to IPO", "Mitchell, Eric"),
    ]
)

Uses = Callable[[Mapping[str, Any]], bool]


def _more(key: str, than: float = 0.0) -> Uses:
    return lambda cfg: isinstance(value := cfg.get(key), (int, float)) and value > than


def _less(key: str, than: float) -> Uses:
    return lambda cfg: isinstance(value := cfg.get(key), (int, float)) and value < than


def _is(key: str, *values: Any) -> Uses:
    return lambda cfg: cfg.get(key) in values


def _loss(*names: str) -> Uses:
    """Whether one of these losses is taken, alone or among others."""
    return lambda cfg: bool(set(names) & set(loss if isinstance(loss := cfg.get("loss"), list) else [loss]))


def _all(*uses: Uses) -> Uses:
    return lambda cfg: all(one(cfg) for one in uses)


# Class of the algorithm -> papers of all its variants, then of those that its keys (the section `algorithm`) ask for.
OF_CLASS: dict[str, tuple[str, ...]] = {
    "BCO": ("2404.04656",),
    "CPO": ("2401.08417",),
    "DPO": ("2305.18290",),
    "GKD": ("2306.13649",),
    "GRPO": ("2402.03300",),
    "NashMD": ("2312.00886",),
    "ORPO": ("2403.07691",),
    "OnlineDPO": ("2402.04792", "2305.18290"),
    "PLDPO": ("2305.18290",),
    "PPO": ("1707.06347", "1909.08593", "1506.02438"),
    "PRM": ("2211.14275", "2305.20050"),
    "RAFT": ("2304.06767",),
    "RLOO": ("2402.14740",),
    "ReMax": ("2310.10505",),
    "ReinforcePP": ("2501.03262",),
    "RewardModel": ("2009.01325", "2203.02155"),
    "RewardModelRanked": ("2203.02155",),
    "RewardModelScored": ("2311.09528",),
    "SFT": (),
    "SLiC": ("2305.10425",),
    "SimPO": ("2405.14734",),
    "TPO": ("2405.16681",),
    "XPO": ("2405.21046",),
    "KTO": (),
}
OF_KEYS: tuple[tuple[str, str, Uses], ...] = (
    ("DPO", CDPO, _all(_more("label_smoothing"), _loss("sigmoid"))),
    ("DPO", "2403.00409", _loss("robust")),
    ("DPO", "2305.10425", _loss("hinge")),
    ("DPO", "2309.06657", _loss("hinge")),
    ("DPO", "2310.12036", _loss("ipo")),
    ("DPO", "2411.15124", _loss("sigmoid_norm")),
    ("DPO", "2402.00856", _loss("exo_pair")),
    ("DPO", "2406.08414", _loss("discopop")),
    ("DPO", "2402.05369", _loss("nca_pair")),
    ("DPO", "2404.04656", _loss("bco_pair")),
    ("DPO", "2405.00675", _loss("sppo_hard")),
    ("DPO", "2406.05882", _loss("aot", "aot_unpaired")),
    ("DPO", "2408.06266", _loss("apo_zero", "apo_down")),
    ("DPO", "2411.10442", lambda cfg: isinstance(cfg.get("loss"), list)),
    ("DPO", "2404.19733", _all(_more("nll_weight"), _is("loss", "sigmoid"))),
    ("DPO", "2405.16436", _all(_more("nll_weight"), _is("loss", "sigmoid"))),
    ("DPO", "2409.06411", _less("ld_alpha", 1.0)),
    ("DPO", "2406.11827", _is("wpo", True)),
    ("DPO", "2309.16240", lambda cfg: cfg.get("divergence") not in (None, "reverse_kl")),
    ("KTO", "2402.01306", lambda cfg: True),
    ("KTO", "2408.06266", _loss("apo_zero_unpaired")),
    ("SFT", "2508.05629", _loss("dft")),
    ("SFT", "2310.05914", _more("neftune_alpha")),
    ("SimPO", "2501.03884", _more("alpha")),
    ("CPO", "2405.14734", _loss("simpo")),
    ("GRPO", "2503.14476", _loss("dapo")),
    ("", "2503.20783", _loss("dr_grpo")),
    ("GRPO", "2508.08221", _is("scale_rewards", "batch")),
    ("", "2506.13585", _loss("cispo")),
    ("", "2507.18071", _loss("gspo", "gspo_token", "luspo")),
    ("", "2602.05261", _loss("luspo")),
    ("", "2511.20347", _loss("sapo")),
    ("", "2602.10693", _loss("vespo")),
    ("", "2507.20673", _loss("gmpo")),
    ("", "2506.01939", _less("top_entropy", 1.0)),
)


def papers_of(config: Mapping[str, Any]) -> list[Paper]:
    """The papers behind a run's config: of its algorithm and variant, then of its adapter, strategy and reference."""
    algorithm, model = config.get("algorithm") or {}, config.get("model") or {}
    kind, lora = _class(algorithm), model.get("lora") or {}
    found = list(OF_CLASS.get(kind, ()))
    found += [where for of, where, uses in OF_KEYS if of in ("", kind) and uses(algorithm)]
    if model.get("adapter") == "lora":
        found += ["2106.09685", *(["2402.09353"] if lora.get("use_dora") else [])]
    if _class(config.get("strategy") or {}) == "QLoRA":
        found.append("2305.14314")
    if _class(config.get("ref_strategy") or {}) == "Sync":
        found.append("2404.09656")
    return [PAPERS[where] for where in dict.fromkeys(found)]


def _class(node: Mapping[str, Any]) -> str:
    return str(node.get("_target_", "")).rpartition(".")[2]
