"""Chat messages to text, token by token: a decode loop over a transformers causal LM. Called by the stage `chat`.

One request at a time, with transformers' own cache. An engine that batches many requests is another stage's business;
what this one is for is to be short enough to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import stage_runtime as omni
from stage_models.voice.conversation import Turn


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. temperature 0 is greedy: the same prompt gives the same answer."""

    max_tokens: int = 96
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added. The last piece has ``finish`` set, and perhaps no text."""

    text: str
    tokens: int
    finish: str | None = None


class ChatModel:
    """A causal LM with a chat template, loaded from a checkpoint directory."""

    def __init__(self, checkpoint: Path, *, threads: int, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
        loader: Any = AutoModelForCausalLM
        self._model: Any = loader.from_pretrained(str(checkpoint), local_files_only=True, dtype=getattr(torch, dtype))
        self._model.eval()
        self._ends = {int(self._tokenizer.eos_token_id)}
        self.context_tokens = int(self._model.config.max_position_embeddings)

    def encode(self, messages: Sequence[Turn]) -> list[int]:
        """The prompt's token ids, the template's opening of an answer included."""
        spoken = [{"role": turn.role, "content": turn.text} for turn in messages]
        encoded = self._tokenizer.apply_chat_template(spoken, add_generation_prompt=True, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[Piece]:
        """Text as it is made. Ends early, without a last piece, once ``cancelled()`` says so.

        Raises: InvalidRequest: the prompt leaves no room for an answer.
        """
        if len(prompt) + sampling.max_tokens > self.context_tokens:
            raise omni.InvalidRequest(
                f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}; "
                f"the model holds {self.context_tokens} together"
            )
        detokeniser = Detokeniser(lambda tokens: str(self._tokenizer.decode(tokens, skip_special_tokens=True)))
        stopper = Stopper(sampling.stop)
        made = 0
        for token in self._tokens(prompt, sampling):
            if cancelled():
                return
            made += 1
            ended = token in self._ends
            text, stopped = stopper.feed("" if ended else detokeniser.feed(token))
            if ended or stopped or made == sampling.max_tokens:
                tail = "" if stopped else stopper.feed(detokeniser.flush())[0] + stopper.flush()
                finish = "stop" if ended or stopped else "length"
                yield Piece(text=text + tail, tokens=made, finish=finish)
                return
            yield Piece(text=text, tokens=made)

    def _tokens(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Token ids without end; the caller decides when it has enough."""
        import torch

        choose = _chooser(sampling)
        ids, cache = torch.tensor([list(prompt)]), None
        while True:
            # Entered anew for each step: a generator that is left in mid-air must not leave the mode on its thread.
            with torch.inference_mode():
                step = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                token = choose(step.logits[0, -1].float())
            yield token
            ids, cache = torch.tensor([[token]]), step.past_key_values


def _chooser(sampling: Sampling) -> Callable[[Any], int]:
    """logits ``[vocabulary]`` f32 -> token id."""
    import torch

    if sampling.temperature <= 0:
        return lambda logits: int(logits.argmax())
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)

    def choose(logits: Any) -> int:
        probabilities, tokens = (logits / sampling.temperature).softmax(-1).sort(descending=True)
        # The nucleus: the fewest tokens whose probabilities reach top_p; the first is always in it.
        probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0.0
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])

    return choose


class Detokeniser:
    """Tokens to text, one by one: holds back bytes of a character that is not whole yet."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        #: Characters of the decoded text that were given out.
        self._told = 0

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """What was held back, once no token comes any more."""
        return self._tell(self._decode(self._tokens)) if self._tokens else ""

    def _tell(self, text: str) -> str:
        new, self._told = text[self._told :], len(text)
        return new


class Stopper:
    """Ends a text at the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to tell, and whether a stop string was reached."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            told, self._held = self._held[: min(found)], ""
            return told, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        told, self._held = self._held[:cut], self._held[cut:]
        return told, False

    def flush(self) -> str:
        """What was held back: no stop string after all."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` begin ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
