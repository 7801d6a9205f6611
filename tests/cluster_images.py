"""The images that the cluster tests use, built by the kit from the repository's own Dockerfiles.

Here: their names, and the commands that build them. The kit keeps layers, so an image that is built twice is built
once; it loads an image into the cluster when the cluster runs. Not here: the cluster (`cluster_kit`).

It builds all of them as a program (``make images``), so that .ci/run can do so beside other work. Standard library
only: it runs before there is a virtual environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OPERATOR = "localhost/omnipipeline-operator:e2e"
STAGE = "localhost/omnipipeline-stage:e2e"
VOICE = "localhost/omnipipeline-voice:e2e"
RELAYS = "localhost/omnipipeline-stage:relays"
APART = "localhost/omnipipeline-stage:apart"
BUILD_S = 1800.0  # of a machine that has neither the base image nor torch yet, and other things to do
_SHOWN = 3000  # characters of a failed build's output


def kit() -> Path | None:
    """The kit's program, when there is one."""
    named = os.environ.get("OMNI_CLUSTER_KIT")
    found = Path(named) if named else REPOSITORY.parent / "shared" / "cluster" / "cluster"
    return found if found.is_file() else None


def given() -> tuple[str, str] | None:
    """The operator's and the stage image that the cluster has already, when the environment names both."""
    operator, stage = os.environ.get("OMNI_TEST_OPERATOR_IMAGE"), os.environ.get("OMNI_TEST_STAGE_IMAGE")
    return (operator, stage) if operator and stage else None


def build(image: str, *arguments: str, folder: Path = REPOSITORY) -> str:
    """Build ``image`` with ``arguments`` for ``docker build``, and load it where a cluster runs; its name.

    Raises: RuntimeError: the build failed; with the last lines of its output.
    """
    program = kit()
    if program is None:
        raise RuntimeError(f"no kit ($OMNI_CLUSTER_KIT) to build {image} with")
    command = [str(program), "build", "-t", image, *arguments, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        raise RuntimeError(f"cannot build {image}: {done.stdout[-_SHOWN:]}{done.stderr[-_SHOWN:]}")
    return image


def operator() -> str:
    return build(OPERATOR, "-f", "Dockerfile", "--target", "operator")


def stage() -> str:
    """The image that docs/install.md builds for the examples."""
    return build(STAGE, "-f", "Dockerfile", "--target", "stage", "--build-arg", "EXTRAS=engine,chat,qwen3-omni")


def relays() -> str:
    """The stage image with the packages of the relays nixl and mooncake, for a CPU."""
    return build(RELAYS, "-f", "Dockerfile", "--target", "stage", "--build-arg", "EXTRAS=nixl,mooncake")


def apart() -> str:
    """The stage image of examples/disaggregated over nixl and mooncake, for a CPU. Only tests of the night need it."""
    return build(APART, "-f", "Dockerfile", "--target", "stage", "--build-arg", "EXTRAS=engine,chat,nixl,mooncake")


def voice(stage_image: str = STAGE) -> str:
    """The image of examples/voice, made from a stage image."""
    return build(VOICE, "-f", "examples/voice/Dockerfile", "--build-arg", f"STAGE_IMAGE={stage_image}")


def main() -> None:
    """Build all that each run needs, one after the other; nothing where the cluster has images of ours already."""
    if given() is not None:
        return
    for make in (operator, stage, voice, relays):
        print(make(), flush=True)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
