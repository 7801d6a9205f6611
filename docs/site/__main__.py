"""Build the site: strictly, so that a link or an anchor without a target fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docs.site import sources

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sources.write(ROOT, ROOT / "build" / "site-sources")
    sys.exit(subprocess.call([Path(sys.executable).with_name("zensical"), "build", "--strict"], cwd=ROOT))
