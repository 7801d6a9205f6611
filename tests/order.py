"""The order in which files of tests start.

``make test`` gives whole files to its workers. The files that take longest start first, so that no worker ends alone
with one of them while the others have nothing left. The order changes no result.
"""

from __future__ import annotations

from typing import Final

#: More than 15 s of processor time each, in the test's process and its children. The longest is first.
LONGEST: Final = (
    "e2e/test_profiles.py",
    "e2e/test_engines_apart.py",
    "engines/test_engine_process.py",
    "faults/test_faults.py",
    "relays/test_relay_contract.py",
    "e2e/test_talker.py",
    "relays/test_nixl.py",
    "engines/test_prompt_rows.py",
    "engines/test_kv_folder.py",
    "engines/test_process_stage.py",
    "engines/test_call_answers.py",
)
#: Their other files start processes; those of the folders that are not named here take seconds.
FOLDERS: Final = ("e2e", "faults", "qwen3_omni", "engines", "cli", "processes", "relays")
_PLACES: Final = {name: place for place, name in enumerate((*LONGEST, *FOLDERS))}


def place(path: str) -> int:
    """The place of this file. path: below ``tests``."""
    folder, _, _ = path.partition("/")
    return _PLACES.get(path, _PLACES.get(folder, len(_PLACES)))
