"""Keys that other servers of this API know: those with their default value are dropped, others name a counterpart.

Clients of vLLM send its extra keys with their defaults. Pure; called by `schemas`.
"""

from __future__ import annotations

from typing import Any, Final

#: Extra keys of vLLM and vLLM-Omni, with their defaults there. Any unknown key that is null counts as a default, too.
DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "task_type": ("CustomVoice",),
    "use_beam_search": (False,),
}

#: Keys of other servers -> what has the same effect here.
COUNTERPARTS: Final[dict[str, str]] = {
    "allowed_token_ids": "logit_bias",
    "bad_words": "logit_bias",
    "best_of": "n",
    "chat_template": "omni.Prompt(template=…) in the stage",
    "documents": "messages",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "request_id": "the header X-Request-Id",
    "stop_sequences": "stop",
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an unknown key may be dropped."""
    return value is None or any(type(value) is type(one) and value == one for one in _defaults(name))


def counterpart(name: str) -> str:
    """The hint of an error about an unknown key; empty: nothing is known of it."""
    return f"; here it is {COUNTERPARTS[name]}" if name in COUNTERPARTS else ""


def _defaults(name: str) -> tuple[Any, ...]:
    known = DEFAULTS.get(name, ())
    return (*known, *(float(one) for one in known if type(one) is int))
