"""How long and how much memory many JSONL rows take: scanned, cleaned and tokenised, and again from the cache.

    python benchmarks/data_scale.py --rows 100000 --rows 1000000 --json benchmarks/data_scale.json

Each start is a process of its own, on the byte tokenizer of `model=tiny`. Peak RSS is that of the whole process; the
line "nothing" is one that has only imported the same libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORDS = [
    f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki") for b in ("la", "mer", "nit", "pol", "rus")
]


def write_rows(file: Path, count: int) -> None:
    """Demonstrations of 5 to 30 words each way, one in a hundred a copy of the row before it."""
    draw = random.Random(0)
    line = ""
    with file.open("w", encoding="utf-8") as handle:
        for number in range(count):
            if number % 100 != 99:
                ask, reply = (" ".join(draw.choices(WORDS, k=draw.randint(5, 30))) for _ in range(2))
                line = json.dumps({"question": f"{number}: {ask}?", "response": reply, "id": number // 7})
            handle.write(line + "\n")


def start(file: str, num_rows: int) -> dict[str, Any]:
    """One start: the data of a run, and every hundredth example read once."""
    sys.path.insert(0, str(ROOT))
    from alignment.data.jsonl import Jsonl
    from alignment.data.prepare import prepare
    from alignment.model.tiny import Tiny

    model = Tiny(path=None)
    encoding = {"max_prompt_tokens": 512, "max_completion_tokens": 512, "max_length": None, "truncation": "keep_end"}
    model.tokenizer("a")
    before = time.perf_counter()
    made: dict[str, Any] = {"examples": 0}
    if num_rows:
        prepared = prepare(
            Jsonl(path=file),
            "demonstrations",
            model,
            num_prompts=64,
            with_heldout=True,
            encoding=encoding,
            cleaning={"duplicates": "drop", "decontaminate": True, "ngram": 13},
        )
        made = {
            "examples": len(prepared.train) + len(prepared.heldout),
            "dropped": prepared.reports["train"]["dropped"],
        }
        made["prompt_tokens_of_every_100th"] = sum(
            len(prepared.train[i].prompt_ids) for i in range(0, len(prepared.train), 100)
        )
    seconds = time.perf_counter() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return made | {"seconds": round(seconds, 1), "rows_per_s": int(num_rows / seconds), "peak_rss_mib": round(peak)}


def measured(name: str, file: Path, num_rows: int, folder: str) -> dict[str, Any]:
    """The same in a process of its own, with a cache of its own."""
    words = [sys.executable, __file__, "--start", str(file), "--rows", str(num_rows)]
    env = os.environ | {"ALIGNMENT_CACHE": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    result = {"rows": num_rows, "start": name} | json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", required=True, help="rows of a file; may be repeated")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.start:
        print(json.dumps(start(flags.start, flags.rows[0])))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for count in flags.rows:
            file = Path(folder) / f"{count}.jsonl"
            write_rows(file, count)
            for name, number in (("nothing", 0), ("first", count), ("second", count)):
                results.append(measured(name, file, number, folder))
            file.unlink()
    if flags.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        flags.json.write_text(json.dumps({"command": sys.argv, **machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
