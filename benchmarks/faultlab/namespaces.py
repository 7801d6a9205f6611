"""Names of network namespaces and links that carry the process that made them, so that what a killed run left behind
is recognised and deleted by the next one. Needs root.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from pathlib import Path
from typing import Final

SPACES: Final = Path("/run/netns")
LINKS: Final = Path("/sys/class/net")
COMMAND_S: Final = 60.0  # of a command that changes the network


def ip(*words: str) -> bytes:
    """Raises: CalledProcessError: it fails."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, timeout=COMMAND_S).stdout


def limit(space: str, link: str, nbytes_per_s: int, *, burst_nbytes: int = 16 << 10) -> None:
    """Let no more bytes a second out of a namespace by that link. burst_nbytes: so many at once, after a pause."""
    shape = ("tbf", "rate", f"{8 * nbytes_per_s}bit", "burst", f"{burst_nbytes}b", "latency", "400ms")
    argv = ["tc", "-n", space, "qdisc", "replace", "dev", link, "root", *shape]
    subprocess.run(argv, check=True, capture_output=True, timeout=COMMAND_S)


def new_name(prefix: str) -> str:
    """A new name: ``prefix`` (2 characters) and 11 others at most. A link's name has 15; its maker may append some."""
    return f"{prefix}{os.getpid():x}x{secrets.token_hex(1)}"


def delete_left(prefix: str) -> None:
    """Delete the namespaces and links whose process is gone."""
    pattern = re.compile(rf"{prefix}([0-9a-f]+)x[0-9a-f]{{2}}")
    for folder, kind in ((SPACES, "netns"), (LINKS, "link")):
        for name in sorted(os.listdir(folder)) if folder.exists() else []:
            found = pattern.match(name)
            if found is not None and not Path(f"/proc/{int(found[1], 16)}").exists():
                # Another run may delete it at the same time; the end of one link of a pair deletes the other.
                subprocess.run(["ip", kind, "del", name], capture_output=True, timeout=COMMAND_S)
