"""``kubectl omni call``: an operation of engines of a real pipeline, behind a stand-in of kubectl."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.cli.test_up import PATIENCE_S, base, up
from tests.operator.kubectl.test_kubectl_profile import FakeCluster, pod

__all__ = ["base"]


def test_an_operation_is_asked_of_any_ready_coordinator_and_each_answer_is_shown(base: Path, tmp_path: Path) -> None:
    with up(base, environ={"PATH": "/usr/bin:/bin"}) as program:
        url = program.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        program.wait_for("curl")
        pods = [pod("c1"), pod("c0", ready=False), pod("c2")]
        cluster = FakeCluster(tmp_path, pods=pods, pipelines={"hello": {}}, port=int(url.rpartition(":")[2]))
        none = cluster.omni("call", "hello", "shout", "flush")
        wrong = cluster.omni("call", "hello", "shuot", "flush")
        bad = cluster.omni("call", "hello", "shout", "flush", "--arguments", "7")
        nan = cluster.omni("call", "hello", "shout", "flush", "--arguments", '{"a": NaN}')
        program.program.send_signal(signal.SIGINT)
        program.program.wait(PATIENCE_S)
    assert none.exit_code == 1
    assert re.fullmatch(r"\S+ [0-9a-f]{16}: stage 'shout' takes no operations\n", none.stderr)
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: the coordinator refuses: 'shuot' is not a stage: the pipeline has ")
    assert bad.exit_code == 2 and "a JSON object is expected" in bad.stderr
    assert nan.exit_code == 2 and "NaN" in nan.stderr
