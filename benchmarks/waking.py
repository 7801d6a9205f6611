"""The time of a pod's wake-up until its weights are in memory, by where they lie: `python -m benchmarks.waking [--mib
N] [--rounds N]`.

A model of random safetensors in a real S3 server on this machine. Steps are processes, as in a pod: the fetch that the
node lacks; the same fetch where the node has the model (``--quick``, an init container's); a Job's thorough look. Then
come a stage's own check and the weights, mapped and each byte read, from the disk (the kernel is told to forget the
files) and from the page cache, as a second instance on a node reads them. A claim, and an image mounted by the node,
lack the fetch and have the last two. Not here: scheduling, pulling images, a model's own code, copies to a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from stage_runtime.weights import folders
from tests.weights import s3_server
from tests.weights.s3_server import BUCKET, S3

URL: Final = f"s3://{BUCKET}/waking"
FILES: Final = 4
READS: Final = """
import os, sys, time
began = time.monotonic()
from stage_runtime.weights import folders
imported = time.monotonic()
folder = folders.local(sys.argv[1], os.environ)
checked = time.monotonic()
import torch
from safetensors import safe_open
libraries = time.monotonic()
for each in sorted(os.listdir(folder)):
    if each.endswith(".safetensors"):
        with safe_open(os.path.join(folder, each), framework="pt") as weights:
            for name in weights.keys():
                weights.get_tensor(name).view(torch.int64).sum()
print(imported - began, checked - imported, libraries - checked, time.monotonic() - libraries)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with s3_server.serving() as s3:
        s3.clear()
        put(s3, options.mib << 20)
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as root:
                for step, seconds in of_one(s3, Path(root)).items():
                    found.setdefault(step, []).append(seconds)
    print(f"{options.mib} MiB, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}; seconds: median, least, most")
    for step, times in found.items():
        print(f"{step:<44} {statistics.median(times):7.2f} {min(times):7.2f} {max(times):7.2f}")
    return 0


def put(s3: S3, nbytes: int) -> None:
    """Put the model into the store, in files of equal size."""
    import torch
    from safetensors.torch import save

    for number in range(FILES):
        tensor = torch.randint(-(2**62), 2**62, (nbytes // FILES // 8,), dtype=torch.int64)
        s3.put(f"waking/model-{number}.safetensors", save({"weight": tensor}))


def of_one(s3: S3, root: Path) -> dict[str, float]:
    """The seconds of each step, on a node that has nothing yet."""
    environment = {**os.environ, **s3.environment(), "OMNI_MODELS_DIR": str(root)}
    fetch = [sys.executable, "-m", "stage_runtime", "prefetch", URL]

    def seconds(*command: str) -> float:
        began = time.monotonic()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began

    def reads(source: str) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, "-c", READS, URL], env=environment, check=True, capture_output=True, text=True
        )
        imported, checked, libraries, read = map(float, done.stdout.split())
        steps = {"the runtime's imports": imported, "sizes and times compared": checked}
        return steps | {"torch imported": libraries, f"weights read from the {source}": read}

    found = {
        "fetched from the store": seconds(*fetch, "--quick"),
        "fetched where the node has it": seconds(*fetch, "--quick"),
        "hashed anew by a Job": seconds(*fetch),
    }
    forget(folders.link(root, URL).resolve())
    return found | reads("disk") | reads("page cache")


def forget(folder: Path) -> None:
    """Have the kernel forget the content of files that it holds in memory."""
    os.sync()
    for each in folder.iterdir():
        with each.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
