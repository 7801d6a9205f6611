"""Keys that other servers of this API know: those with their default value are dropped, others name a counterpart.

Clients of vLLM and of SGLang send their extra keys with their defaults. Pure; called by `schemas`.
"""

from __future__ import annotations

from typing import Any, Final

#: Extra keys of vLLM, vLLM-Omni and SGLang, with their defaults there. Any unknown key that is null counts as a
#: default, too.
DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "task_type": ("CustomVoice",),
    "use_beam_search": (False,),
}

#: A chat's template writes its special tokens; those of a text are added, here as there.
_SPECIAL_TOKENS: Final = "add_special_tokens"

#: Keys of other servers -> what has the same effect here.
COUNTERPARTS: Final[dict[str, str]] = {
    "add_special_tokens": "a list of token ids",
    "allowed_token_ids": "logit_bias",
    "bad_words": "logit_bias",
    "best_of": "n",
    "chat_template": "omni.Prompt(template=…) in the stage",
    "documents": "messages",
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "random_seed": "seed",
    "regex": "structured_outputs.regex",
    "request_id": "the header X-Request-Id",
    "stop_sequences": "stop",
}


def asks_for_nothing(name: str, value: Any, *, of_chat: bool) -> bool:
    """Whether an unknown key may be dropped. of_chat: the body has messages, and not texts."""
    if name == _SPECIAL_TOKENS:
        return value is None or (isinstance(value, bool) and value != of_chat)
    return value is None or any(type(value) is type(one) and value == one for one in _defaults(name))


def counterpart(name: str) -> str:
    """The hint of an error about an unknown key; empty: nothing is known of it."""
    return f"; here it is {COUNTERPARTS[name]}" if name in COUNTERPARTS else ""


def _defaults(name: str) -> tuple[Any, ...]:
    known = DEFAULTS.get(name, ())
    return (*known, *(float(one) for one in known if type(one) is int))
