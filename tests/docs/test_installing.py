"""pip's configuration on a machine holds for uv as well, or uv is left alone."""

from __future__ import annotations

import pytest

from tests.install_packages import parse_settings, uv_environment

LISTED = """\
:env:.default-timeout='180'
:env:.find-links='/wheels /more'
global.cert='/etc/ssl/ca.crt'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/elsewhere'
install.constraint='/etc/pip/constraints.txt'
list.format='columns'
"""


def test_the_environment_s_settings_win_and_other_commands_are_left_out() -> None:
    settings = parse_settings(LISTED)
    assert settings["find-links"] == "/wheels /more"
    assert "format" not in settings


def test_uv_looks_where_pip_looks() -> None:
    assert uv_environment(parse_settings(LISTED)) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/ssl/ca.crt",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_CONSTRAINT": "/etc/pip/constraints.txt",
    }


@pytest.mark.parametrize("name", ["no-binary", "only-binary", "proxy", "pre", "no-index"])
def test_a_setting_without_a_counterpart_leaves_it_to_pip(name: str) -> None:
    assert uv_environment({"index-url": "https://example.test/simple", name: "1"}) is None
