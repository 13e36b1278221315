"""Whom a run has to cite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment import config
from alignment import help as manual
from alignment.experiment.citations import OF_CLASS, OF_KEYS, PAPERS, papers_of
from alignment.validate import CONF

ALGORITHMS = sorted(manual.options(CONF, "algorithm"))
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
# What stands on the first page of these papers' abstracts: the algorithm of that name.
OWN = {
    "alphapo": "2501.03884", "aot": "2406.05882", "apo_down": "2408.06266", "apo_zero_unpaired": "2408.06266",
    "bco": "2404.04656", "cispo": "2506.13585", "cpo": "2401.08417", "dapo": "2503.14476", "dft": "2508.05629",
    "discopop": "2406.08414", "dpo": "2305.18290", "dpo_norm": "2411.15124", "dr_grpo": "2503.20783",
    "exo": "2402.00856", "gkd": "2306.13649", "gmpo": "2507.20673", "grpo": "2402.03300", "gspo": "2507.18071",
    "hinge": "2305.10425", "ipo": "2310.12036", "irpo": "2404.19733", "kto": "2402.01306", "ld_dpo": "2409.06411",
    "luspo": "2602.05261", "mpo": "2411.10442", "nash_md": "2312.00886", "nca": "2402.05369",
    "online_dpo": "2402.04792", "orpo": "2403.07691", "ppo": "1707.06347", "prm": "2305.20050", "raft": "2304.06767",
    "rdpo": "2403.00409", "reinforce_pp": "2501.03262", "remax": "2310.10505", "rloo": "2402.14740",
    "rpo": "2405.16436", "rso": "2309.06657", "sapo": "2511.20347", "simpo": "2405.14734", "slic": "2305.10425",
    "sppo": "2405.00675", "tpo": "2405.16681", "vespo": "2602.10693", "wpo": "2406.11827", "xpo": "2405.21046",
}  # fmt: skip


@pytest.fixture(scope="module")
def composed() -> Iterator[dict[str, dict[str, Any]]]:
    with config.composer(config.parse([])) as session:
        found = {}
        for name in ALGORITHMS:
            cfg = session.settle([f"algorithm={name}", "ref_strategy=frozen", "model.adapter=none"])[0]
            assert cfg is not None
            found[name] = config.resolve(cfg)[0]
        yield found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_cites_its_paper(composed: dict[str, dict[str, Any]], name: str) -> None:
    cited = [paper.where for paper in papers_of(composed[name])]
    assert cited or name == "sft"
    assert OWN.get(name) in (None, *cited)


def test_variants_do_not_cite_each_other(composed: dict[str, dict[str, Any]]) -> None:
    assert [paper.where for paper in papers_of(composed["dpo"])] == ["2305.18290"]
    assert [paper.where for paper in papers_of(composed["simpo"])] == ["2405.14734"]
    assert [paper.where for paper in papers_of(composed["ipo"])] == ["2305.18290", "2310.12036"]
    assert {paper.where for paper in papers_of(composed["luspo"])} == {"2402.03300", "2507.18071", "2602.05261"}
    assert "2503.14476" not in [paper.where for paper in papers_of(composed["rloo"])]


def test_what_is_trained_and_compared_with_is_cited_too() -> None:
    run = {"algorithm": {"_target_": "alignment.algorithm.sft.SFT", "neftune_alpha": 5.0, "loss": "nll"}}
    run |= {"model": {"adapter": "lora", "lora": {"use_dora": True}}}
    run |= {"strategy": {"_target_": "alignment.strategy.qlora.QLoRA"}}
    run |= {"ref_strategy": {"_target_": "alignment.ref_strategy.sync.Sync"}}
    cited = [paper.where for paper in papers_of(run)]
    assert cited == ["2310.05914", "2106.09685", "2402.09353", "2305.14314", "2404.09656"]


def test_entries_are_whole_and_their_keys_differ() -> None:
    assert len({paper.key for paper in PAPERS.values()}) == len(PAPERS)
    for where, paper in PAPERS.items():
        assert paper.where == where
        text = paper.bibtex
        assert text.count("{") == text.count("}")
        assert re.match(r"@misc\{[a-z]+\d{4}[a-z0-9]+,\n", text), text
    assert PAPERS["2305.18290"].bibtex.splitlines()[0] == "@misc{rafailov2023direct,"
    assert "  eprint        = {2305.18290}," in PAPERS["2305.18290"].bibtex


def test_every_paper_is_cited_somewhere_and_the_page_knows_those_of_algorithms() -> None:
    by_class = {where for papers in OF_CLASS.values() for where in papers}
    used = by_class | {where for _, where, _ in OF_KEYS}
    extra = {"2106.09685", "2402.09353", "2305.14314", "2404.09656"}
    assert used | extra == PAPERS.keys()
    # The page names IRPO's loss by a later paper that has it.
    unknown = {where for where in used if where[0].isdigit() and where not in PAGE} - {"2404.19733"}
    assert not unknown
