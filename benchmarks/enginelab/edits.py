"""Prompts whose answers repeat most of them: code that is to be written again, with one name changed.

Called by `benchmarks.engine` (``edit``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.enginelab.others import Ask
from stage_runtime.rules.autoregressive import balancing, blocks, requests, scheduling, waiting_queue, waves

FROM: Final = (scheduling, blocks, waves, balancing, waiting_queue, requests)
LINES: Final = 36
WISH: Final = (
    "Write this code again, with `self` renamed to `this`. Answer with the code alone.\n\n```python\n{code}\n```"
)


def _pieces(count: int) -> Sequence[str]:
    """Pieces of modules of this package, of so many lines each."""
    lines = [inspect.getsource(module).splitlines() for module in FROM]
    found = ["\n".join(one[at : at + LINES]) for one in lines for at in range(30, len(one) - LINES, LINES)]
    return [found[index % len(found)] for index in range(count)]


def asks(tokenizer: Any, count: int, new: int) -> list[Ask]:
    """new: tokens of an answer."""
    wishes = [[{"role": "user", "content": WISH.format(code=code)}] for code in _pieces(count)]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True) for one in wishes]
    return [Ask(list(prompt["input_ids"]), new) for prompt in prompts]
