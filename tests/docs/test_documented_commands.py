"""Commands of `omni` and `kubectl omni` that the pages show: each exists, with these options and arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from omnipipeline_operator.kubectl.cli import main as kubectl_omni
from stage_runtime.cli import main as omni
from tests.docs.blocks import ROOT

BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
SHOWN = re.compile(r"(omni|kubectl omni) (\S.*)")
#: The end of a command in a line of a shell, and what stands for something else.
END = re.compile(r"\s(?:#|\||>|&|;)\s?|;|&$")


def shown() -> Iterator[tuple[str, str]]:
    """(page, command) of code blocks and of code in sentences."""
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]):
        text = page.read_text()
        lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
        for line in lines:
            if (found := SHOWN.fullmatch(line.strip().removeprefix("$ "))) is not None:
                yield page.name, found[0]


def problem(command: str) -> str:
    """Why it cannot be typed like this; empty where it can. An option at the end may lack its value: it is a name."""
    program, rest = SHOWN.fullmatch(command).groups()  # type: ignore[union-attr]
    words = [word for word in shlex.split(END.split(re.sub(r"[\[\]…]", " ", rest))[0]) if word]
    found: click.Command = omni if program == "omni" else kubectl_omni
    context = click.Context(found)
    try:
        while isinstance(found, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            if (made := found.get_command(context, name)) is None:
                return f"{program} has no command {name}"
            found, context = made, click.Context(made, parent=context)
        if not isinstance(found, click.Group):
            _options, left, _order = found.make_parser(context).parse_args(list(words))
            return f"too many arguments: {left}" if left else ""
    except click.BadOptionUsage as error:
        return "" if words[-1] == error.option_name else error.format_message()
    except click.UsageError as error:
        return error.format_message()
    return ""


def test_each_command_that_a_page_shows_can_be_typed() -> None:
    found = list(shown())
    assert len(found) > 100
    assert [(page, command, why) for page, command in found if (why := problem(command))] == []


def test_a_command_that_does_not_exist_or_takes_something_else_is_found() -> None:
    assert problem("omni call STAGE load_adapter '{}'") == "too many arguments: ['{}']"
    assert problem("omni serve -f pipeline.yaml") == "omni has no command serve"
    assert "--second" in problem("kubectl omni profile NAME --second 20")
    assert problem("kubectl omni history NAME [--revision N]") == ""
    assert problem("omni up --debug") == ""
