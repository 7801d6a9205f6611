"""Install packages into the environment that runs this: by uv, with what pip is configured to do here, else by pip.

    .venv/bin/python tests/install_packages.py -e '.[runtime]'

uv unpacks a hundred packages in a tenth of pip's time. It does not read pip's settings, and a machine that finds its
torch through them would get another build: what they say is handed on. A setting with no counterpart leaves it to pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

UV = "uv"  # its version is in constraints.txt
CONSTRAINTS = ("-c", "constraints.txt")
PIP = (sys.executable, "-m", "pip")
PIP_INSTALL = (*PIP, "install", "--quiet", "--disable-pip-version-check", *CONSTRAINTS)

#: pip's settings -> uv's variables. Lists are separated by blanks in pip's and in these.
COUNTERPARTS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
#: They change nothing about which file is installed.
IRRELEVANT = {"disable-pip-version-check", "default-timeout", "timeout", "retries", "no-compile", "quiet", "cache-dir",
              "no-cache-dir", "progress-bar", "root-user-action", "no-input", "no-color"}  # fmt: skip


def uv_environment(pip_settings: Mapping[str, str]) -> dict[str, str] | None:
    """Variables that make uv look where pip looks; None where a setting has no counterpart.

    pip_settings: name -> value, without the section.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the best of all indexes, as pip takes
    for name, value in pip_settings.items():
        joined = " ".join(value.split())
        if name == "find-links":
            variables["UV_FIND_LINKS"] = ",".join(joined.split())
        elif name in COUNTERPARTS:
            variables[COUNTERPARTS[name]] = joined
        elif name not in IRRELEVANT:
            return None
    return variables


def parse_settings(listed: str) -> dict[str, str]:
    """`pip config list`, as name -> value. The environment's come first in it, and win."""
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install", ":env:"):
            settings.setdefault(name, value.strip("'\"").replace("\\n", " "))
    return settings


def install_by_uv(arguments: list[str]) -> bool:
    """Whether uv has installed them."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    variables = uv_environment(parse_settings(listed))
    if variables is None or subprocess.run([*PIP_INSTALL, UV]).returncode != 0:
        return False
    command = [
        sys.executable,
        "-m",
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
        *CONSTRAINTS,
        *arguments,
    ]
    return subprocess.run(command, env={**os.environ, **variables}).returncode == 0


def main(arguments: list[str]) -> int:
    if install_by_uv(arguments):
        return 0
    print("uv has not installed them: pip does", file=sys.stderr, flush=True)
    return subprocess.run([*PIP_INSTALL, *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
