"""The places where each field of the spec and of the plan is read, as the type checker sees it.

A copy of the types is checked in which every field is a deprecated property: mypy then reports each place that reads
one, with the class it belongs to. A search for the name would find ``device`` wherever something else is called so.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.docs.blocks import ROOT

CONTRACT = ROOT / "crds/omnipipeline_spec"
SHADOWED = ("types/plan", "pipeline", "cluster")
# Types of others, and rooms that get no spec and no plan, are not followed, which halves the time. A field that a
# later change reads only there counts as unread, so the test that asks fails, and the room leaves the list.
CONFIG = """\
[mypy]
exclude = stage_runtime/(web|relays|sockets|profiler|engines/autoregressive|wire|telemetry|kv_transfer)/
explicit_package_bases = true
ignore_missing_imports = true
python_version = 3.11
enable_error_code = deprecated
[mypy-torch.*,numpy.*,kubernetes.*,aiohttp.*,fastapi.*,starlette.*,pydantic.*,uvicorn.*,kopf.*,httpx.*,rich.*,\
cryptography.*,zmq.*,soundfile.*,huggingface_hub.*,prometheus_client.*,av.*,soxr.*,click.*,uvloop.*,httptools.*,\
transformers.*,tokenizers.*,safetensors.*,numba.*,llvmlite.*,llguidance.*,onnxruntime.*,opentelemetry.*,websockets.*,\
jinja2.*,huggingface_hub.*,psutil.*,tqdm.*,stage_runtime.web.*,stage_runtime.relays.*,stage_runtime.sockets.*,\
stage_runtime.profiler.*,stage_runtime.engines.autoregressive.*,stage_runtime.wire.*,stage_runtime.telemetry.*,\
stage_runtime.kv_transfer.*]
follow_imports = skip
follow_imports_for_stubs = true
"""
READ = re.compile(r"(\S+?):\d+: .*function omnipipeline_spec\.(?:\w+\.)+?(\w+)\.(\w+) is deprecated: read")
PROPERTY = "@property\n@_deprecated('read')\ndef {name}(self) -> {kind}: ...\n"

Reads = Mapping[tuple[str, str], frozenset[str]]  #: (class, field) -> files that read it.


@functools.cache
def reads() -> Reads:
    """All reads of fields in the three packages."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "mypy.ini"
        config.write_text(CONFIG)
        shadows: list[str] = []
        for name in SHADOWED:
            shadow = Path(folder) / f"{Path(name).name}.py"
            shadow.write_text(_as_properties((CONTRACT / f"{name}.py").read_text()))
            shadows += ["--shadow-file", f"crds/omnipipeline_spec/{name}.py", str(shadow)]
        packages = ["-p", "omnipipeline_spec", "-p", "omnipipeline_operator", "-p", "stage_runtime"]
        command = [sys.executable, "-m", "mypy", "--config-file", str(config), f"--cache-dir={os.devnull}"]
        environment = {**os.environ, "MYPYPATH": os.pathsep.join(["crds", "operator", "."])}
        done = subprocess.run(
            [*command, *packages, *shadows], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        read = READ.match(line)
        if read is not None:
            file, kind, field = read.groups()
            found[kind, field].add(Path(file).as_posix())
    assert found, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return {place: frozenset(files) for place, files in found.items()}


def _as_properties(source: str) -> str:
    """The module with every field of a frozen value as a deprecated property of the same type."""
    tree = ast.parse(source)
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef) and any(option.arg == "frozen" for option in kind.keywords):
            kind.body = [_as_property(statement) for statement in kind.body]
    after = next(index for index, one in enumerate(tree.body) if isinstance(one, ast.ImportFrom)) + 1
    tree.body[after:after] = ast.parse("from typing_extensions import deprecated as _deprecated").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _as_property(statement: ast.stmt) -> ast.stmt:
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        return statement
    text = PROPERTY.format(name=statement.target.id, kind=ast.unparse(statement.annotation))
    return ast.parse(text).body[0]
