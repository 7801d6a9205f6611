"""``python -m stage_runtime.engines.autoregressive.process ENDPOINT INDEX PARENT NAME``: one engine."""

from __future__ import annotations

from stage_runtime import imports

with imports.uncollected():
    from stage_runtime.engines.autoregressive.process import program
    from stage_runtime.engines.autoregressive.process.proc import EngineCoreProc

if __name__ == "__main__":
    program.main(lambda init: EngineCoreProc)
