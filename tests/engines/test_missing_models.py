"""A model that is not there: the error says what may be given instead."""

from __future__ import annotations

import pytest

from stage_runtime.engines.autoregressive.model import models
from stage_runtime.errors import ConfigurationError


@pytest.mark.parametrize("model", ["/no/such/folder", "./gone", "~/gone"])
def test_a_folder_that_does_not_exist_is_not_taken_for_a_name_at_the_hub(model: str) -> None:
    with pytest.raises(ConfigurationError, match=r"does not exist: give a checkpoint's folder"):
        models.load_tokenizer(model)
