"""``python -m stage_runtime.engines.autoregressive.data_parallel.engine_process ENDPOINT INDEX PARENT NAME``.

An engine process among several of one instance.
"""

from __future__ import annotations

from stage_runtime import imports

with imports.uncollected():
    from stage_runtime.engines.autoregressive.data_parallel.dp_engine import DataParallelProc, DPEngineCoreProc
    from stage_runtime.engines.autoregressive.process import program
    from stage_runtime.engines.autoregressive.process.messages.engine_messages import Init
    from stage_runtime.engines.autoregressive.process.proc import EngineCoreProc


def kind(init: Init) -> type[EngineCoreProc]:
    """The class of an engine process: in lockstep with the other engines, or independent of them."""
    return DPEngineCoreProc if init.coordination is not None and init.coordination.lockstep else DataParallelProc


if __name__ == "__main__":
    program.main(kind)
