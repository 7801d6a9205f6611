"""Chat templates with marked texts: what came from a client can be told from the template's own text. See `marked`.

The environment is transformers', in which literals are `Marked`, too, so that every operation of a template meets one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from transformers.utils import chat_template_utils as templates

from stage_runtime.engines.autoregressive.text.prompts import marked
from stage_runtime.engines.autoregressive.text.prompts.marked import Alphabet, Marked

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_CONTINUED: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers marks the place where the last message ends


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | None) else ""


# The tests marked `gpu` run with transformers 5.17, which has neither of the two.
#: Reasoning under the names that templates know.
_ALIASED: Final[Callable[[Any], Any]] = getattr(templates, "_alias_reasoning_fields", list)
#: Nothing with methods that a template could call.
_PLAIN: Final[Callable[[Any], Any]] = getattr(templates, "_plain_template_data", _plain)


def render(
    source: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], special: Mapping[str, Any]
) -> tuple[str, Alphabet]:
    """The text that a template writes of messages, with substitutes for a client's characters; and these.

    names: what the template is given beside the messages; strings in it are a client's. special: the names of the
    tokenizer's special tokens, which are not.
    Raises: what the template raises.
    """
    given = dict(names)
    alphabet = Alphabet(source + "".join(map(str, special.values())))
    chat = [_message(message, source, alphabet) for message in _ALIASED([dict(one) for one in messages])]
    continued = given.pop("continue_final_message", False)
    if continued:
        field = continued if isinstance(continued, str) else "content"
        chat[-1][field] = chat[-1][field] + _CONTINUED
    arguments = {"tools": None, "documents": None, **_marked(given, alphabet, keys=False)}
    text = marked.joined([_compiled(source).render({**special, **arguments, "messages": chat})], alphabet)
    return marked.buffer(_until_tag(text) if continued else text), alphabet


def _message(message: Mapping[str, Any], source: str, alphabet: Alphabet) -> dict[str, Any]:
    """A role that the API names, or a word that the template does, is not a client's text: templates make control
    strings of it.
    """
    found: dict[str, Any] = _marked(
        {key: value for key, value in message.items() if value is not None}, alphabet, keys=False
    )
    role = message.get("role")
    if isinstance(role, str) and (role in _ROLES or _is_named(role, source)):
        found["role"] = role
    return found


def _is_named(role: str, source: str) -> bool:
    """A template names control strings, too; they are not roles."""
    return role.isidentifier() and (f"'{role}'" in source or f'"{role}"' in source)


def _marked(value: Any, alphabet: Alphabet, *, keys: bool = True) -> Any:
    if isinstance(value, str):
        return alphabet.mark(value)
    if isinstance(value, Mapping):
        inner = value.items()
        return {
            alphabet.mark(key) if keys and isinstance(key, str) else key: _marked(one, alphabet) for key, one in inner
        }
    if isinstance(value, list | tuple):
        return [_marked(one, alphabet) for one in value]
    return _PLAIN(value)


def _until_tag(text: Marked) -> Marked:
    at = marked.buffer(text).rindex(_CONTINUED.strip())
    return text[:at] if text[at:].startswith(_CONTINUED) else text[:at].rstrip()


# --- the environment ----------------------------------------------------------------------------------------------


class _Code(CodeGenerator):
    """Literals are `Marked`, and so are texts that ``~`` makes."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.literal({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write(")))")


@functools.lru_cache(64)
def _compiled(source: str) -> jinja2.Template:
    environment: Any = templates._compile_jinja_template(source).environment.overlay()
    environment.code_generator_class = _Code
    environment.concat = marked.joined
    environment.literal = functools.lru_cache(1024)(Marked)
    own = {"tojson": _tojson, "join": _join}
    environment.filters = {name: _seen_through(one) for name, one in environment.filters.items()} | own
    return environment.from_string(source)  # type: ignore[no-any-return]


def _seen_through(change: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that sees the true characters of marked texts. Its result is a client's text."""
    first = 1 if hasattr(change, "jinja_pass_arg") else 0

    @functools.wraps(change)
    def filtered(*values: Any, **named: Any) -> Any:
        given = change(*values, **named)
        alphabet = marked.alphabet_in(values[first:])
        if alphabet is None or not isinstance(values[first], str):
            return given
        true = change(*map(marked.true, values), **{name: marked.true(value) for name, value in named.items()})
        if not isinstance(true, str):
            return true if isinstance(true, bool | int | float) else given
        return marked.joined([given], alphabet) if alphabet.true(given) == true else alphabet.mark(true)

    return filtered


@jinja2.pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(context.environment, attribute), value)
    return Marked(d).join(map(str, value)) if not isinstance(d, Marked) else d.join(map(str, value))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter ``tojson``, as transformers has it. Texts are escaped before, by their true characters."""
    alphabet = marked.alphabet_in(value)
    if alphabet is not None:
        value = _escaped(value, alphabet, ensure_ascii, sort_keys)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii and alphabet is None, indent=indent, separators=separators,
        sort_keys=sort_keys and alphabet is None,
    )  # fmt: skip
    return marked.joined([text], alphabet)


def _escaped(value: Any, alphabet: Alphabet, ascii: bool, sort: bool) -> Any:
    if isinstance(value, Marked):
        return "".join(
            marked.buffer(alphabet.mark(json.dumps(run, ensure_ascii=ascii)[1:-1]))
            if is_marked or not run.isascii()
            else run
            for is_marked, run in alphabet.runs(value)
        )
    if isinstance(value, Mapping):
        pairs = sorted(value.items()) if sort else value.items()
        return {_escaped(key, alphabet, ascii, sort): _escaped(one, alphabet, ascii, sort) for key, one in pairs}
    if isinstance(value, list | tuple):
        return [_escaped(one, alphabet, ascii, sort) for one in value]
    return value
