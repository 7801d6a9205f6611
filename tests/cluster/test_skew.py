"""A roll to an image that speaks another protocol, under load: neither side ever sees the other, and nobody notices."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests import cluster_images
from tests.cluster.installing import Installed, wait_for, wait_ready
from tests.cluster.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

#: How long the next image's coordinator waits for a set of stages. Old stages look for new coordinators every
#: 2 s (`stage.control.registration.RESOLVE_EVERY_S`), later on a busy machine: until one has said Hello, it seems to be
#: alone.
READY_AFTER_S = 8.0
LOADING_S = 2 * READY_AFTER_S
#: The same image but for two constants: its protocol is a later one, and its coordinator does not wait long for a set
#: of stages, so that `LOADING_S` is longer, as the loading of a large model is.
DOCKERFILE = r"""
FROM {stage}
USER 0
RUN cd /opt/omnipipeline/lib/python3*/site-packages/stage_runtime \
    && sed -i 's/^PROTOCOL: Final = [0-9]*/PROTOCOL: Final = 99/' wire/frames.py \
    && sed -i 's/^READY_AFTER_S: Final = [0-9.]*/READY_AFTER_S: Final = {ready_after_s}/' coordinator/membership.py \
    && grep -q '^PROTOCOL: Final = 99' wire/frames.py \
    && grep -q '^READY_AFTER_S: Final = {ready_after_s}' coordinator/membership.py \
    && find . -name '*.pyc' -delete
USER 65532:65532
"""


@pytest.fixture(scope="session")
def next_image(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stage image of the next version, as far as protocols go."""
    given = os.environ.get("OMNI_TEST_NEXT_STAGE_IMAGE")
    if given:
        return given
    folder, name = tmp_path_factory.mktemp("next"), "localhost/omnipipeline-stage:e2e-next"
    Path(folder, "Dockerfile").write_text(DOCKERFILE.format(stage=installed.images.stage, ready_after_s=READY_AFTER_S))
    return cluster_images.build(name, "-f", "Dockerfile", folder=folder)


async def test_a_roll_to_another_protocol_and_back_fails_no_request(
    installed: Installed, choir: str, next_image: str
) -> None:
    async with Load(choir, clients=4, slow=1) as load:
        await load.some(20)
        late = {"image": next_image, "envDefaults": {"LOADING_S": str(LOADING_S)}}
        for image, spec in ((next_image, late), (installed.images.stage, dict.fromkeys(late))):
            before = installed.uids("choir")
            installed.patch("choir", spec)
            await asyncio.to_thread(_rolled, installed, before, image)
            await load.some(50)
    assert load.failures() == {}, load.failures()


def _rolled(installed: Installed, before: set[str], image: str) -> None:
    wait_for(f"no pod but those of {image}", lambda: installed.uids("choir").isdisjoint(before), timeout_s=200)
    wait_ready(installed.cluster, installed.namespace, "choir")
    images = {pod["spec"]["containers"][0]["image"] for pod in installed.pods("choir")}
    assert images == {image}
