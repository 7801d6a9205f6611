"""What the web room is told when it starts. Filled by `processes` from the coordinator's plan and the environment."""

from __future__ import annotations

import msgspec


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one pipeline's HTTP side."""

    model: str  #: The one id that `/v1/models` answers.
    serves: tuple[str, ...] = ()  #: OpenAI routes that are answered: ``chat``, ``speech``, ``transcription``.
    max_body_bytes: int = 64 << 20  #: A larger body is refused (413) before it is read to its end.
    media_hosts: tuple[str, ...] = ()  #: ``host`` or ``host:port`` from which ``image_url`` and the like are fetched.
    media_timeout_s: float = 10.0  #: For one fetch, redirects included.
    api_keys: tuple[str, ...] = ()  #: Any of them opens ``/v1`` and admin routes; none: no key is asked for.
    heartbeat_s: float = 15.0  #: Silence of an event stream after which a comment is sent; proxies cut at 30 to 60 s.
    probes: bool = True  #: `/livez`, `/readyz`, `/status`, `/metrics` on this port too (`omni up`).
    created: int = 0  #: Unix time for `/v1/models`; 0: when the app was made.
