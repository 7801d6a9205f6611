"""Settings of the HTTP side. Filled by `processes` from the coordinator's plan and the environment."""

from __future__ import annotations

import msgspec

from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.memory_budget import GRACE_S


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one pipeline's HTTP side."""

    model: str  #: The one id that `/v1/models` answers.
    serves: tuple[str, ...] = ()  #: OpenAI routes that are answered: ``chat``, ``speech``, ``transcription``.
    accepts: frozenset[str] = frozenset()  #: Parameters of a chat that the pipeline honours beyond the usual ones.
    max_body_bytes: int = 64 << 20  #: A larger body is refused (413) before it is read to its end.
    media_hosts: tuple[str, ...] = ()  #: ``host`` or ``host:port`` from which ``image_url`` and the like are fetched.
    media_timeout_s: float = 10.0  #: The limit of one fetch, redirects included.
    api_keys: ApiKeys = msgspec.field(default_factory=ApiKeys)  #: Any opens ``/v1`` and admin routes.
    max_held_bytes: int = 512 << 20  #: Bytes of bodies and media of all requests in flight; beyond it new ones get 429.
    body_grace_s: float = GRACE_S  #: A body's time, and a second more for each `memory_budget.MIN_RATE` bytes.
    text_idle_s: float = 60.0  #: A client that streams a text to speak may write nothing for so long.
    local: bool = False  #: Served at a loopback address: without keys, Host must be a name of it.
    hosts: tuple[str, ...] = ()  #: More names that this server goes by, and pages of which may ask without a key.
    heartbeat_s: float = 15.0  #: Silence of an event stream after which a comment is sent; proxies cut at 30 to 60 s.
    probes: bool = True  #: `/status` and `/metrics` on this port too (`omni up`).
    created: int = 0  #: Unix time for `/v1/models`; 0: when the app was made.
