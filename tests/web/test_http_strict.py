"""Bodies that other servers would read otherwise, or that cost more than they weigh: JSON and forms, pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.exchanges import errors
from stage_runtime.web.reading import multipart, strictjson
from stage_runtime.web.translating import media, pipelines
from stage_runtime.web.translating.audio import transcribing
from stage_runtime.web.translating.generation import chat
from tests.thoroughness import examples

ANY = msgspec.json.Decoder(Any)
DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (b'{"inputs":1,"inputs":2}', "inputs: the key occurs twice", "inputs"),
        (b'{"inputs":{"a":[0,{"b":1,"b":1}]}}', "inputs.a[1].b: the key occurs twice", "inputs.a[1].b"),
        (b'{"inputs":1,"in\\u0070uts":2}', "inputs: the key occurs twice", "inputs"),
        (b'{"inputs":%s}' % DEEP, "the body is nested too deeply", None),
        (b'{"inputs":%s}' % (b"[" * 90_000 + b"]" * 90_000), "the body is nested too deeply", None),
        (b'{"inputs":[%s1]}' % (b"[]," * (1 << 20)), "the body has more than 131072 values", None),
        (b'{"inputs":[%s1]}' % (b'"",' * (1 << 20)), "the body has more than 131072 values", None),
        (b'{"inputs":{%s}}' % b",".join(b'"%d":{}' % n for n in range(140_000)), "the body has more than", None),
        (b'{"inputs":"%s' % (b"," * 200_000), "the body is not JSON: ", None),
        (b'{"inputs":"%s' % (b'\\",' * 140_000), "the body is not JSON: ", None),
        (b'{"inputs":NaN}', "the body is not JSON: ", None),
        (b'{"inputs":-Infinity}', "the body is not JSON: ", None),
        (b'{"inputs":1e999}', "inputs: number out of range", "inputs"),
        (b'{"inputs":%s}' % (b"9" * 5000), "inputs: integer value out of range", "inputs"),
        (b'{"inputs":"\\ud800"}', "the body is not JSON: ", None),
        (b'{"inputs":"\xed\xa0\x80"}', "the body is not JSON: ", None),
        (b'{"inputs":"\xff"}', "the body is not JSON: ", None),
        (b'\xef\xbb\xbf{"inputs":1}', "the body is not JSON: ", None),
        (b'{"inputs":1}{"inputs":2}', "the body is not JSON: ", None),
        (b'{"%s":1}' % (b"k" * (8 << 20)), "kkkkkk", None),
    ],
)
def test_json_that_is_ambiguous_or_too_dear_is_refused_with_the_place(
    raw: bytes, message: str, param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pipelines.decode(raw)
    shown = errors.body(caught.value, "r")["error"]
    assert shown["message"].startswith(message)
    assert param is None or shown["param"] == param
    assert len(msgspec.json.encode(shown)) < 10_000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text('\\"[]{},:', min_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(value=JSON, padding=st.sampled_from([0, strictjson.SMALL]))
def test_sound_json_is_read_as_it_is_however_large(value: Any, padding: int) -> None:
    raw = msgspec.json.encode(value) + b" " * padding
    assert strictjson.decode(raw, ANY) == msgspec.json.decode(raw)


@settings(max_examples=examples(100), deadline=None)
@given(
    value=st.dictionaries(st.text(max_size=300), JSON, min_size=1, max_size=4),
    padding=st.sampled_from([0, strictjson.SMALL]),
    data=st.data(),
)
def test_a_key_that_is_there_twice_is_named_however_large(value: dict[str, Any], padding: int, data: Any) -> None:
    key = data.draw(st.sampled_from(sorted(value)))
    again = msgspec.json.encode({key: None})
    raw = b"[0," + msgspec.json.encode(value)[:-1] + b"," + again[1:] + b" " * padding + b"]"
    with pytest.raises(InvalidRequest) as caught:
        strictjson.decode(raw, ANY)
    if len(key.encode()) < 40:
        assert caught.value.param == f"[1].{key}"


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""', "[1]"])
def test_as_many_values_as_there_may_be_are_read_and_one_more_is_not(value: str) -> None:
    most = strictjson.MAX_VALUES // (2 if value == "[1]" else 1)
    inner = ",".join([value] * (most - 2))  # beside them: the list and the object around it
    assert len(pipelines.decode(b'{"inputs":[%s]}' % inner.encode()).inputs) == most - 2
    with pytest.raises(InvalidRequest):
        pipelines.decode(b'{"inputs":[%s,%s,%s,0]}' % (inner.encode(), value.encode(), value.encode()))


def test_text_full_of_commas_and_quotes_is_one_value() -> None:
    text = ',[{"' * 100_000
    assert pipelines.decode(msgspec.json.encode({"inputs": text})).inputs == text


def form(head: bytes, data: bytes = b"1") -> bytes:
    return b"--b\r\n" + head + b"\r\n\r\n" + data + b"\r\n--b--\r\n"


TYPE = "multipart/form-data; boundary=b"
NAMED = b'Content-Disposition: form-data; name="'


@pytest.mark.parametrize(
    ("raw", "content_type", "message"),
    [
        (form(NAMED + b'a\x00b"'), TYPE, "part 0: a name has at most 256 bytes"),
        (form(NAMED + b'a\x1bb"'), TYPE, "part 0: a name has at most 256 bytes"),
        (form(NAMED + b'a\tb"'), TYPE, "part 0: a name has at most 256 bytes"),
        (form(NAMED + "a\x85b".encode() + b'"'), TYPE, "part 0: a name has at most 256 bytes"),
        (form(NAMED + b'"'), TYPE, "the form has a part without a name"),
        (form(NAMED + b'\xff"'), TYPE, "part 0: a name that is not UTF-8"),
        (form(NAMED + b'f"; filename="\xff"'), TYPE, "part 0: a file name that is not UTF-8"),
        (form(NAMED + b"a" * 257 + b'"'), TYPE, "part 0: a name has at most 256 bytes"),
        (form(NAMED + b'f"; filename="' + b"a" * 1025 + b'"'), TYPE, "part 0: a file name has at most 1024 bytes"),
        (form(NAMED + b'f"\r\nContent-Type: ' + b"a" * 300), TYPE, "part 0: a media type has at most 256 bytes"),
        (form(NAMED + b"a" * (1 << 20) + b'"'), TYPE, "the body is not multipart/form-data"),
        (form(b"X: 1\r\n" * 1000 + NAMED + b'a"'), TYPE, "the body is not multipart/form-data"),
        (form(b"Content-Type: text/plain"), TYPE, "the form has a part without a name"),
        (form(NAMED + b'a"') * 1, "multipart/form-data; boundary=" + "b" * 300, "the body is not multipart/form-data"),
        (b"".join(b"--b\r\n" + NAMED + b'a"\r\n\r\n1\r\n' for _ in range(300)) + b"--b--", TYPE, "the form has more"),
        (form(NAMED + b'a"'), "multipart/form-data; boundary=c", "the body is not multipart/form-data"),
        (b"", TYPE, "the body is not multipart/form-data"),
        (b"--b\r\n", TYPE, "the body is not multipart/form-data"),
    ],
)
def test_a_form_that_is_odd_is_refused_and_not_logged(
    raw: bytes, content_type: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        multipart.parse(raw, content_type)
    assert caught.value.message.startswith(message)
    assert caplog.messages == []


def test_names_of_files_are_in_any_language() -> None:
    raw = form(NAMED + b'file"; filename="' + "質問.wav".encode() + b'"')
    assert multipart.parse(raw, TYPE)[0].filename == "質問.wav"


@pytest.mark.parametrize(
    ("read", "names", "message"),
    [
        (pipelines.from_form, ["params", "params"], "params: the field occurs twice"),
        (transcribing.read, ["language", "language"], "language: the field occurs twice"),
        (transcribing.read, ["language", "language[]"], "language: the field occurs twice"),
    ],
)
def test_a_field_that_is_there_twice_is_refused(read: Callable[..., Any], names: list[str], message: str) -> None:
    parts = [multipart.FormPart(name=name, filename=None, content_type="", data=b"{}") for name in names]
    with pytest.raises(InvalidRequest) as caught:
        read(parts)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a":1,"a":2}', "a: the key occurs twice; a form's"),
        (DEEP, "inputs is nested too deeply; a form's"),
        (b"[" + b"[]," * 200_000 + b"1]", "the form has more than 131072 values"),
    ],
)
def test_a_form_s_json_is_as_strict_as_a_body(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pipelines.from_form([field("inputs", data)])
    assert caught.value.message.startswith(message)


def field(name: str, data: bytes) -> multipart.FormPart:
    return multipart.FormPart(name=name, filename=None, content_type="", data=data)


@pytest.mark.parametrize("value", [b"[]", b'""'])
def test_the_fields_of_a_form_together_have_as_many_values_as_a_body(value: bytes) -> None:
    def of(count: int) -> bytes:
        return b'{"a":[%s]}' % b",".join([value] * (count - 2))

    half = strictjson.MAX_VALUES // 2
    assert len(pipelines.from_form([field("inputs", of(half)), field("params", of(half))]).inputs["a"]) == half - 2
    for counts in ([half, half + 1], [half, half - 1, 2]):
        parts = [field(name, of(count)) for name, count in zip(("inputs", "params", "metadata"), counts, strict=False)]
        with pytest.raises(InvalidRequest) as caught:
            pipelines.from_form(parts)
        assert caught.value.message.startswith("the form has more than 131072 values")


def test_a_field_that_a_form_does_not_have_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidRequest) as caught:
        pipelines.from_form([field("imputs", b"[" + b"[]," * 200_000 + b"1]")])
    message = (
        "imputs: unknown parameter; did you mean 'inputs'?; a value for the stages goes into the field inputs, "
        "a JSON object with the key 'imputs'; a form's fields are JSON, its files need a file name"
    )
    assert (caught.value.message, caught.value.param) == (message, "imputs")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png" + ";" * (1 << 20) + ",x", "p: no data URL"),
        ("data:image/svg+xml," + "%41" * (1 << 20), "p: a data URL of more than 65536 characters must be base64"),
        ("data:image/a b,x", "p: 'image/a b' is not a media type"),
        ("data:image/\r\nx: y,x", "p: "),
        ("data:image/" + "x" * 200 + ",x", "p: "),
    ],
)
def test_a_data_url_that_costs_more_than_it_weighs_is_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        media.data_url(url, "image", "p")
    assert caught.value.message.startswith(message)


def test_a_small_svg_may_be_percent_encoded() -> None:
    assert media.data_url("data:image/svg+xml;charset=utf-8,%3Csvg/%3E", "image", "p").data == b"<svg/>"


@pytest.mark.parametrize("format", ["", "x" * 100, "a b", "wav\n", "../x", "\u2028"])
def test_a_format_of_audio_that_is_none_is_refused(format: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "", "format": format}}
    body = chat.decode(msgspec.json.encode({"messages": [{"role": "user", "content": [part]}]}))
    with pytest.raises(InvalidRequest) as caught:
        chat.request(body, "r", {})
    assert caught.value.param == "messages[0].content[0].input_audio.format"


@pytest.mark.parametrize("words", ["x" * (1 << 20), "\ud800", "\x00", ""])
def test_an_error_is_short_and_can_be_said_whatever_it_quotes(words: str) -> None:
    encoded = errors.encoded(InvalidRequest(words, param=words), "r")
    assert len(encoded) < 4000
    assert msgspec.json.decode(encoded)["error"]["code"] == "invalid_request"
