"""Variables by which an object store is reached: what is taken, and what is refused without its value."""

from __future__ import annotations

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.weights.access import Access

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def test_values_lose_the_line_feed_that_a_file_gave_them() -> None:
    access = Access(
        {
            "AWS_ACCESS_KEY_ID": "key\n",
            "AWS_SECRET_ACCESS_KEY": " secret\r\n",
            "AWS_ENDPOINT_URL": "http://[::1]:9000\n",
        }
    )
    assert access.config == {
        "aws_endpoint": "http://[::1]:9000",
        "aws_region": "us-east-1",
        "aws_access_key_id": "key",
        "aws_secret_access_key": "secret",
    }


def test_the_endpoint_and_region_of_s3_alone_win() -> None:
    access = Access(
        {
            "AWS_ENDPOINT_URL": "http://all",
            "AWS_ENDPOINT_URL_S3": "https://s3",
            "AWS_DEFAULT_REGION": "eu",
            "AWS_REGION": "us",
            "AWS_SKIP_SIGNATURE": "true",
        }
    )
    assert access.config == {"aws_endpoint": "https://s3", "aws_region": "us", "aws_skip_signature": "true"}


@pytest.mark.parametrize(
    "variables, message",
    [
        ({**KEYS, "AWS_SECRET_ACCESS_KEY": "two\nlines"}, "AWS_SECRET_ACCESS_KEY: expected visible ASCII characters"),
        ({**KEYS, "AWS_SESSION_TOKEN": "t\u00f6ken"}, "AWS_SESSION_TOKEN: expected visible ASCII characters"),
        ({"AWS_REGION": "us east"}, "AWS_REGION: expected visible ASCII characters"),
        ({"AWS_ACCESS_KEY_ID": "key"}, "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not"),
        ({"AWS_SECRET_ACCESS_KEY": "two"}, "AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID is not"),
        ({"AWS_ENDPOINT_URL": "minio:9000"}, "AWS_ENDPOINT_URL: expected http://HOST:PORT"),
        ({"AWS_ENDPOINT_URL": "http://"}, "AWS_ENDPOINT_URL: expected http://HOST:PORT"),
        ({"AWS_ENDPOINT_URL": "http://minio:99999"}, "AWS_ENDPOINT_URL: expected http://HOST:PORT"),
        ({"AWS_ENDPOINT_URL": "http://[::1"}, "AWS_ENDPOINT_URL: expected http://HOST:PORT"),
        ({"AWS_ENDPOINT_URL_S3": "http://me:two@minio"}, "AWS_ENDPOINT_URL_S3: expected http://HOST:PORT"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_name_alone(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Access(variables)
    assert str(caught.value).startswith(message)
    assert "two" not in str(caught.value)


def test_a_key_that_another_one_contains_is_hidden_too() -> None:
    access = Access({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "a-key-of-keys"})
    shown = access.line(ValueError("key: a-key-of-keys\n\nis wrong\nDebug source: everything"))
    assert shown == "***: *** is wrong"


@pytest.mark.parametrize(("variables", "advised"), [({}, True), (KEYS, False), ({"AWS_SKIP_SIGNATURE": "true"}, False)])
def test_an_error_says_that_no_keys_are_set(variables: dict[str, str], advised: bool) -> None:
    shown = Access(variables).line(ValueError("no role"))
    assert shown == "no role" + advised * "; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set"
