"""``omni init``: a new pipeline to edit, small enough to read and complete enough to run.

Here: writing the files. The template is the hello pipeline, with a word on each part.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from omnipipeline_spec import terminal
from omnipipeline_spec.types import quantities, resource
from stage_runtime.cli import options
from stage_runtime.errors import ConfigurationError

FILE = "pipeline.yaml"

_TEMPLATE = """\
# A pipeline of two stages in two processes. Run it here:  omni up -f pipeline.yaml
# The same file on a cluster:                              kubectl apply -f pipeline.yaml
apiVersion: API_VERSION
kind: KIND
metadata: {name: NAME}
spec:
  serves: [chat]                # OpenAI routes that are answered; /v1/pipeline always is
  code:
    inline:                     # small Python lives here; real code in a package on the image
      FILE: |
        import stage_runtime as omni

        # A factory is called once, when its process starts: load models here.
        # What it returns is called for each request.
        def split():
            def run(payload):
                words = payload.request.last_text().split()
                for word in words:
                    yield omni.Chunk({"word": word})        # goes to streamTo at once
                yield omni.Result({"count": len(words)})    # goes to next, last
            return run

        def shout(times=1):
            async def run(session):
                # Chunks arrive while the stage before still works: this answer streams.
                async for chunk in session.chunks():
                    yield omni.Chunk(omni.Text(chunk.data["word"].upper() + "!" * times + " "))
                payload = await session.payload()
                yield omni.Chunk(omni.Usage(completion_tokens=payload.data["count"]))
            return omni.Streaming(run)
  stages:                       # stages with the same `process` share one; a `gpu: [0]` asks for a device
  - {name: split, process: front, factory: "MODULE:split", next: [shout], streamTo: [shout]}
  - {name: shout, process: voice, factory: "MODULE:shout", factoryArgs: {times: 2}, terminal: true}
"""


@click.command("init")
@click.argument("folder", default=".", metavar="[DIR]", type=click.Path(file_okay=False, path_type=Path))
def command(folder: Path) -> None:
    """Write a new pipeline to edit into DIR (here, when not given). Existing files are never touched."""
    with options.errors_as_messages():
        target = folder / FILE
        name = quantities.pipeline_slug(folder.resolve().name)
        # Never the pipeline's own name: a folder called `json` must not shadow a module.
        module = f"{name.replace('-', '_')}_stages"
        facts = {
            "API_VERSION": resource.API_VERSION,
            "KIND": resource.KIND,
            "NAME": name,
            "FILE": f"{module}.py",
            "MODULE": module,
        }
        text = _TEMPLATE
        for word, fact in facts.items():
            text = text.replace(word, fact)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise ConfigurationError(f"{target} is there already, and is left as it is") from error
        terminal.echo(f"{target} is yours to edit. Try it: omni up -f {shlex.quote(str(target))}")
