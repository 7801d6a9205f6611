"""The requests at one stage that are not over there, by their owners and ids and by what engines call them.

State alone: who makes a request's work and who ends it is `stage_input`, which holds its lock for each change. Looked
at from any thread without the lock, so values are replaced whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from stage_runtime.stage.work import RequestWork


class Works:
    def __init__(self) -> None:
        self._works: dict[tuple[str, str], RequestWork] = {}  #: Keys are (owner, request id).
        #: Requests by their ids and by `RequestWork.key`. An id that several coordinators use at once has several.
        self._named: dict[str, tuple[RequestWork, ...]] = {}

    def find(self, owner: str, request_id: str) -> RequestWork | None:
        return self._works.get((owner, request_id))

    def named(self, name: str) -> Sequence[RequestWork]:
        """All of this request id, or the one of this key."""
        return self._named.get(name, ())

    def all(self) -> list[RequestWork]:
        return list(self._works.values())

    def add(self, work: RequestWork) -> RequestWork | None:
        """Returns: the earlier attempt, in whose place it comes."""
        before = self._works.get((work.owner, work.request_id))
        if before is not None:
            self.remove(before)
        self._works[work.owner, work.request_id] = work
        for name in (work.request_id, work.key):
            self._named[name] = (*self._named.get(name, ()), work)
        return before

    def remove(self, work: RequestWork) -> None:
        """Nothing where another attempt has taken its place."""
        if self._works.get((work.owner, work.request_id)) is not work:
            return
        del self._works[work.owner, work.request_id]
        for name in (work.request_id, work.key):
            if others := tuple(one for one in self._named[name] if one is not work):
                self._named[name] = others
            else:
                del self._named[name]
