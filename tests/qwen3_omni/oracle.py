"""transformers' whole model on the cases, in its own process:
``python -m tests.qwen3_omni.oracle CHECKPOINT OUT [NAME...]``.

OUT: an ``npz`` with ``NAME.tokens``, ``NAME.codes [frames, groups]`` and ``NAME.wave`` of each case.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stage_models.qwen3_omni import checkpoint
from stage_models.qwen3_omni.preparing import Preparer
from tests.patience import patience
from tests.qwen3_omni.omni_cases import CASES, FRAMES, Case, request

REPOSITORY = Path(__file__).parents[2]
ORACLE_S = patience(280.0)


def answers(folder: str, kept: Path, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """The output of `main`, from a process of its own. kept: a folder; the first process that asks computes it."""
    out = kept / "omni-answers.npz"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with (kept / "omni-answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            made = out.with_suffix(".part.npz")
            command = [sys.executable, "-m", "tests.qwen3_omni.oracle", folder, str(made)]
            command += [case.name for case in cases]
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=ORACLE_S
            )
            assert done.returncode == 0, done.stderr[-3000:]
            made.replace(out)
    with np.load(out) as found:
        return dict(found)


def load(folder: str) -> Any:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    # transformers 5.23 reads it there where a prompt has both sound and pictures, and it is not there
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model.eval()


def answer(model: Any, preparer: Preparer, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    prepared, pictures, sounds = preparer.prepare(request(case))
    options: dict[str, Any] = {}
    if pictures is not None:
        options |= {"pixel_values": torch.cat(pictures.pixels), "image_grid_thw": torch.tensor(prepared.grids)}
    if sounds is not None:
        longest = max(one.shape[1] for one in sounds.features)
        pad = [torch.nn.functional.pad(one, (0, longest - one.shape[1])) for one in sounds.features]
        there = [(torch.arange(longest) < one.shape[1]).long() for one in sounds.features]
        options |= {"input_features": torch.stack(pad), "feature_attention_mask": torch.stack(there)}
    ids = torch.tensor([prepared.tokens])
    codes: list[torch.Tensor] = []
    hook = model.code2wav.register_forward_pre_hook(lambda _module, given: codes.append(given[0]))
    sequence, wave = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        speaker=prepared.voice,
        thinker_max_new_tokens=case.tokens,
        thinker_eos_token_id=model.config.im_end_token_id,
        talker_max_new_tokens=FRAMES,
        thinker_do_sample=False,
        talker_do_sample=False,
        **options,
    )
    hook.remove()
    return {
        f"{case.name}.tokens": sequence[0, ids.shape[1] :].numpy(),
        f"{case.name}.codes": codes[0][0].T.numpy(),
        f"{case.name}.wave": wave.flatten().numpy(),
    }


def main(folder: str, out: str, *names: str) -> None:
    """names: of the cases; none: all."""
    torch.set_num_threads(1)
    model, preparer = load(folder), Preparer(folder, checkpoint.config_of(folder))
    found: dict[str, Any] = {}
    for case in CASES:
        if not names or case.name in names:
            found |= answer(model, preparer, case)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
