"""Helpers beside the tests of this room (`relay_pairs`, `far_end`) are imported by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
