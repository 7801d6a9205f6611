"""The order in which files of tests start.

``make test`` gives whole files to its workers. The files that take longest start first, so that no worker ends alone
with one of them while the others have nothing left. The order changes no result.
"""

from __future__ import annotations

from typing import Final

#: More than 15 s of processor time each, in the test's process and its children. The longest is first.
LONGEST: Final = (
    "e2e/test_engines_apart.py",
    "faults/test_faults.py",
    "qwen3_omni/test_omni_replicas.py",
    "engines/test_expert_parallel.py",
    "e2e/test_prefill_apart.py",
    "e2e/test_talker.py",
    "qwen3_omni/test_omni_answers.py",
    "relays/test_relay_contract.py",
    "processes/test_local.py",
    "processes/test_admin_commands.py",
    "cli/test_up.py",
    "e2e/test_answers.py",
    "docs/test_debugging_page.py",
    "e2e/test_tensor_parallel_language.py",
    "e2e/test_deaths.py",
    "qwen3_omni/test_omni_edges.py",
    "relays/test_nixl.py",
    "engines/test_prompt_rows.py",
    "faults/test_relay_faults.py",
    "engines/test_kv_folder.py",
    "e2e/test_tensor_parallel.py",
    "engines/test_speculation_stage.py",
    "engines/test_disaggregated_example.py",
    "e2e/test_hostile_values.py",
    "e2e/test_clocks_apart.py",
)
#: Their other files start processes; those of the folders that are not named here take seconds.
FOLDERS: Final = ("e2e", "faults", "qwen3_omni", "engines", "cli", "processes", "relays")
_PLACES: Final = {name: place for place, name in enumerate((*LONGEST, *FOLDERS))}


def place(path: str) -> int:
    """The place of this file. path: below ``tests``."""
    folder, _, _ = path.partition("/")
    return _PLACES.get(path, _PLACES.get(folder, len(_PLACES)))
