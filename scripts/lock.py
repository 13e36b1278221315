"""Rewrites the three constraints files from pyproject.toml: `python scripts/lock.py` (needs `pip install uv`).

The versions of the present files are kept where pyproject.toml still allows them, unless --upgrade or
--upgrade-package NAME (uv's own options) is given.

constraints.txt         the project and its development; torch as a CPU build (or PyPI's for macOS)
constraints-cuda.txt    PyPI's torch for Linux, which is built for CUDA, and the libraries that only it needs
constraints-extras.txt  what the optional extras (deepspeed, sweeps, launchers) need besides

Three files, because pip in hash-checking mode installs every package of a file and refuses any other: with CUDA's
libraries (4 GB) in the first file a CPU machine would fetch them, and with PyPI's hashes beside the CPU build's pip
would take PyPI's torch, since it prefers a file whose hash the index shows to one that lies in a folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAIN, CUDA, EXTRAS = (ROOT / f"constraints{suffix}.txt" for suffix in ("", "-cuda", "-extras"))
CUDA_NAMES = re.compile(r"(nvidia|cuda|triton)\b")

# PyTorch's own CPU builds carry the version of PyPI's files and are not on PyPI: their hashes are added by hand
# (`python -m pip hash FILE` prints one).
CPU_TORCH = {
    "2.13.0": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"],  # cp311, manylinux_2_28_x86_64
}

HEADER = """\
# {what}
# Written by scripts/lock.py from pyproject.toml; do not edit. `./setup.sh` installs it, and so does:
#     {how}
"""


def uv_compile(*arguments: str) -> None:
    """Resolve for every platform and every Python at once."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--universal",
        "--python-version",
        "3.11",
        "--no-header",
        "--quiet",
    ]
    subprocess.run([*command, *arguments], cwd=ROOT, check=True)


def blocks(text: str) -> dict[str, str]:
    """Split a requirements file into one block per package: its pins (one per marker), hashes and `via` comments."""
    found: dict[str, str] = {}
    for block in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE):
        if name := re.match(r"[a-z0-9-]+(?===)", block):
            found[name.group()] = found.get(name.group(), "") + block
    return found


def torch_blocks(version: str, folder: Path) -> tuple[str, str]:
    """Torch's blocks: for constraints.txt (CPU builds, macOS, Windows) and constraints-cuda.txt (PyPI's for Linux)."""
    if version not in CPU_TORCH:
        raise SystemExit(f"add the sha256 of a CPU build of torch {version} to CPU_TORCH in scripts/lock.py")
    request, lock = folder / "torch.in", folder / "pylock.torch.toml"
    request.write_text(f"torch=={version}\n")
    uv_compile(str(request), "--no-deps", "--format", "pylock.toml", "--output-file", str(lock))
    wheels = tomllib.loads(lock.read_text())["packages"][0]["wheels"]
    linux = [wheel["hashes"]["sha256"] for wheel in wheels if "linux" in wheel["url"]]
    others = [wheel["hashes"]["sha256"] for wheel in wheels if "linux" not in wheel["url"]]
    return torch_block(version, CPU_TORCH[version] + others), torch_block(version, linux)


def torch_block(version: str, hashes: list[str]) -> str:
    lines = [f"torch=={version}", *(f"    --hash=sha256:{digest}" for digest in hashes)]
    return " \\\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        everything, needed = folder / "all.txt", folder / "needed.txt"
        # uv keeps the versions that its output file already has.
        everything.write_text("".join(path.read_text() for path in (MAIN, CUDA, EXTRAS) if path.exists()))
        source = ["pyproject.toml", "--generate-hashes", "--output-file"]
        uv_compile(*source, str(everything), "--all-extras", *sys.argv[1:])
        needed.write_text(everything.read_text())
        uv_compile(*source, str(needed), "--extra", "dev")
        pins = blocks(everything.read_text())
        cpu_torch, cuda_torch = torch_blocks(pins["torch"].split()[0].removeprefix("torch=="), folder)
        main_names = blocks(needed.read_text()).keys()
    cuda_names = {name for name in pins if CUDA_NAMES.match(name)}
    extra_names = pins.keys() - main_names - cuda_names
    install = "pip install --require-hashes"
    write(
        MAIN,
        pins | {"torch": cpu_torch},
        main_names - cuda_names,
        "The project and its development; torch as a CPU build, or PyPI's for macOS.",
        f"{install} -r constraints.txt",
    )
    write(
        CUDA,
        pins | {"torch": cuda_torch},
        cuda_names | {"torch"},
        "PyPI's torch for Linux, built for CUDA, and the libraries that only it needs.",
        f"{install} --no-deps -r constraints-cuda.txt    (before constraints.txt)",
    )
    write(
        EXTRAS,
        pins,
        extra_names,
        "What the extras need besides constraints.txt.",
        f"{install} --no-deps --no-build-isolation -r constraints-extras.txt    (after constraints.txt)",
    )


def write(path: Path, pins: dict[str, str], names: set[str], what: str, how: str) -> None:
    path.write_text(HEADER.format(what=what, how=how) + "".join(pins[name] for name in sorted(names)))
    print(f"{path.name}: {len(names)} packages")


if __name__ == "__main__":
    main()
