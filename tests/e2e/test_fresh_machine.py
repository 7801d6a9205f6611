"""README's two commands on a machine that has nothing but Debian's Python, git and make, as root and as a user.

The kit builds an image in which both have run, by Debian's buildah. The rest is one file, so that nothing
large is loaded into a cluster.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import cluster_images

WITHIN_S = 4 * 3600
SHOWN = 8_000  # characters of a failed build's output
DOCKERFILE = """
FROM debian:bookworm-slim AS machine
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv git make
{become}
COPY --chown={user} checkout /home/checkout
WORKDIR /home/checkout
RUN {commands}
FROM debian:bookworm-slim
COPY --from=machine /home/checkout/README.md /README.md
"""
COMMANDS = ("make demo", "make test")
USERS = {"root": "", "person": "RUN useradd --create-home person && chown person /home\nUSER person\n"}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(WITHIN_S + 60)]


def built(folder: Path, user: str, commands: tuple[str, ...] = COMMANDS) -> subprocess.CompletedProcess[str]:
    """The build of an image in which ``user`` has run the commands in a clone of this repository."""
    kit = cluster_images.kit()
    if kit is None:
        pytest.skip("needs the kit beside the checkout ($OMNI_CLUSTER_KIT), to build images")
    subprocess.run(["git", "clone", "-q", str(cluster_images.REPOSITORY), str(folder / "checkout")], check=True)
    lines = DOCKERFILE.format(become=USERS[user], user=user, commands=" && ".join(commands))
    (folder / "Dockerfile").write_text(lines)
    command = [str(kit), "build", "-t", f"localhost/omnipipeline-fresh-{user}:e2e", "-f", "Dockerfile", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S)


@pytest.mark.parametrize("user", list(USERS))
def test_both_commands_of_the_readme_succeed_where_nothing_is_installed(user: str, tmp_path: Path) -> None:
    done = built(tmp_path, user)
    assert done.returncode == 0, done.stdout[-SHOWN:] + done.stderr[-SHOWN:]
