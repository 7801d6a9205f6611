"""The common parts of all clients of an engine core, and of those of engine processes: sockets, requests, deaths."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from stage_runtime.engines.autoregressive.connectors.crossing import ToEngine, ToStage
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process import launching
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch, EngineProcess, ForeignProcess
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    ENGINE_CORE_DEAD,
    KV,
    READY,
    AddHeader,
    Attach,
    Coordination,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineReady,
    FrontEnd,
    Refused,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
    identity,
)
from stage_runtime.engines.autoregressive.process.messages.serial import Buffer, MsgpackDecoder, MsgpackEncoder
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.errors import ConfigurationError, EngineDeadError, OmniError, PeerError, ProtocolError, RequestError
from stage_runtime.sockets import multipart

log = logging.getLogger(__name__)

END_WITHIN_S: Final = 5.0  # of engines that are asked to stop
LOOK_EVERY_S: Final = 1.0  # at whether engines give signs of life
CONNECT_WITHIN_S: Final = 60.0


class UtilityFailed(OmniError):
    """The error that a utility raised in the engine."""


class MPClient:
    """A client of engine processes that it starts. One thread, or one event loop."""

    program: ClassVar[str] = launching.ENGINE  #: The module that the processes run.

    def __init__(
        self,
        launch: EngineLaunch,
        *,
        ranks: Sequence[int] = (0,),
        coordination: Coordination | None = None,
        elastic: bool = False,
        front_ends: int = 1,
        joins: FrontEnd | None = None,
    ) -> None:
        """Blocks until all engines are ready. elastic: engines may be added later. front_ends: clients of these
        engines, in any processes; the others are made with ``joins``, which `front_end` of this one gives, and start
        no engine. They need ``frozen_after_s`` alone of ``launch``.

        Raises: ConfigurationError: one could not start, or has ended.
        """
        self.client_index, self.client_count = (0, front_ends) if joins is None else (joins.index, len(joins.inputs))
        if joins is not None:
            coordination = joins.coordination
        self.launch = launch
        self.reqs_in_flight: dict[str, int] = {}  #: The rank of the engine that computes a request.
        self.num_gpu_blocks: dict[int, int] = {}  #: The number of blocks of each engine.
        self.misread = 0  #: Messages of engines that could not be understood.
        self.stats: dict[int, SchedulerStats] = {}  #: The newest of each engine.
        #: Called with requests that are computed from now on: id, and how many tokens of its prompt were cached.
        self.on_scheduled: Callable[[Sequence[tuple[str, int]]], None] = lambda scheduled: None
        self.on_stats: Callable[[], None] = lambda: None  #: Called when ``stats`` has changed, also of idle engines.
        #: The handler of messages about blocks that cross.
        self.on_kv: Callable[[int, ToStage], None] = lambda rank, message: None
        #: The handler that is called after all that the engine has sent.
        self.on_engine_end: Callable[[int], None] = lambda rank: None
        self._silent: dict[int, int] = {}  #: How often in turn each engine was looked at and had given nothing.
        self._frozen: set[int] = set()  #: Engines that were killed for their silence.
        self._coordination = coordination
        self._dead: EngineDeadError | None = None
        self._calls = itertools.count()
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._kv = MsgpackDecoder[ToStage](ToStage)  # type: ignore[arg-type]  # a union is not a type for mypy
        self._connected: set[bytes] = set()  #: Engines whose output has come.
        self._early: deque[list[memoryview]] = deque()  #: Messages that came while engines were added.
        self._context = multipart.SocketContext()
        self._folder = multipart.Folder()
        self._inputs = joins.inputs if joins else tuple(self._folder.endpoint() for _ in range(front_ends))
        self._outputs_of = joins.outputs if joins else tuple(self._folder.endpoint() for _ in range(front_ends))
        self._input = self._context.bind("ROUTER", self._inputs[self.client_index])
        self._output = self._context.bind("PULL", self._outputs_of[self.client_index])
        self._engines: dict[int, EngineProcess | ForeignProcess] = {}
        self._stats_address = "" if joins is None or coordination is None else coordination.stats
        self._finalizer = weakref.finalize(self, _kill, self._engines, self._folder)
        try:
            if joins is None:
                self._start(ranks)
            else:
                self._join(joins)
            if not elastic and front_ends == 1:
                self._folder.remove()  # all are connected
        except BaseException:
            self._close()
            raise

    def pids_by_rank(self) -> dict[int, int]:
        """The same pids, by the rank of each engine."""
        return {rank: one.pid for rank, one in self._engines.items()}

    @property
    def pids(self) -> list[int]:
        """The pids of the engines that are not known to have ended."""
        return [one.pid for one in self._engines.values()]

    @property
    def ranks(self) -> list[int]:
        """The engines that are not known to have ended."""
        return sorted(self._engines)

    @property
    def dead(self) -> bool:
        """Nothing more is computed."""
        return self._dead is not None

    def ensure_alive(self) -> None:
        """Raises: EngineDeadError."""
        if self._dead is not None:
            raise self._dead

    # --- engines --------------------------------------------------------------------------------------------------

    def _start(self, ranks: Sequence[int]) -> None:
        self._take_in(*self._launch(ranks))

    def _launch(self, ranks: Sequence[int]) -> tuple[list[EngineProcess], dict[int, EngineReady]]:
        """Start engines. Any thread may call this."""
        return launching.start(
            self.launch,
            ranks,
            context=self._context,
            folder=self._folder,
            inputs=self._inputs,
            outputs=self._outputs_of,
            coordination=self._coordination,
            program=self.program,
        )

    def _join(self, joins: FrontEnd) -> None:
        try:
            for rank, (pid, blocks) in joins.engines.items():
                self._engines[rank] = ForeignProcess(rank, pid)
                self.num_gpu_blocks[rank] = blocks
        except ProcessLookupError as error:
            raise ConfigurationError(f"engine {rank}, pid {pid}, has ended") from error
        self._await_routes({identity(rank) for rank in joins.engines})
        for rank in joins.engines:
            self._attach_to(rank)

    def _attach_to(self, rank: int) -> None:
        """Tell an engine that this front end is there."""
        self._send(rank, EngineCoreRequestType.ATTACH, msgspec.msgpack.encode(Attach(self.client_index, os.getpid())))

    def front_end(self, index: int) -> FrontEnd:
        """The argument ``joins`` of another client of these engines, in any process of this user.

        index: counts from 1; each number is used once.
        """
        if not 0 < index < self.client_count:
            raise ValueError(f"front end {index} of {self.client_count}, and 0 is this one")
        engines = {rank: (one.pid, self.num_gpu_blocks[rank]) for rank, one in self._engines.items()}
        return FrontEnd(
            index=index,
            inputs=self._inputs,
            outputs=self._outputs_of,
            engines=engines,
            coordination=self._coordination,
        )

    def _take_in(self, processes: Sequence[EngineProcess], ready: Mapping[int, EngineReady]) -> None:
        """Engines that have just been started are this client's from now on."""
        self._engines.update({one.index: one for one in processes})
        self._await_routes({identity(one.index) for one in processes})
        self.num_gpu_blocks.update({index: one.num_gpu_blocks for index, one in ready.items()})
        for one in ready.values():
            self._stats_address = one.dp_stats_address or ""

    def _await_routes(self, names: set[bytes]) -> None:
        """Both sockets of each engine send one message: ours can address it from then on, and it is connected."""
        missing = set(names)
        poller = multipart.Poller(self._input, self._output)
        while missing | (names - self._connected):
            if not poller.wait(CONNECT_WITHIN_S):
                raise EngineDeadError("an engine that reported ready has not connected")
            while (frames := self._input.receive()) is not None:
                missing.discard(bytes(frames[0]))
            while (frames := self._output.receive()) is not None:
                if not self._take_greeting(frames):
                    self._early.append(frames)  # of an engine that serves already
        self._connected -= names

    def _take_greeting(self, frames: Sequence[memoryview]) -> bool:
        if bytes(frames[0]) != READY:
            return False
        self._connected.add(bytes(frames[-1]))
        return True

    def _on_greeting(self, frames: Sequence[memoryview]) -> None:
        """An engine that this client has not started may be there."""

    def _on_exit(self, rank: int) -> list[EngineCoreOutputs]:
        """An engine's process has ended. Returns: the outputs that end its requests."""
        process = self._engines.pop(rank, None)
        if process is None:
            return []
        self.on_engine_end(rank)
        code = process.exit_code
        process.close()
        self.stats.pop(rank, None)
        self._silent.pop(rank, None)
        if rank in self._frozen:
            self._frozen.discard(rank)
            return self._on_dead(rank, f"engine {rank} gave no sign of life for {self.launch.frozen_after_s:g} s")
        return self._on_dead(rank, f"engine {rank} has ended, exit code {code}")

    def _look(self) -> None:
        """Kill engines that have been silent for too long; called every `LOOK_EVERY_S`.

        Looks are counted, not seconds: when this process was stopped, too, engines are given their time again.
        """
        for rank, engine in self._engines.items():
            silent = self._silent.get(rank, 0)
            self._silent[rank] = silent + 1
            if silent * LOOK_EVERY_S >= self.launch.frozen_after_s:
                self._frozen.add(rank)
                engine.signal(signal.SIGKILL)

    def _on_dead(self, rank: int, reason: str) -> list[EngineCoreOutputs]:
        """All callers that wait are notified."""
        self._dead = self._dead or EngineDeadError(reason)
        return []

    # --- requests -------------------------------------------------------------------------------------------------

    def choose_engine(self, tokens: Sequence[int], *beside: str) -> int:
        """The rank of the engine that computes a further prompt. beside: as of `prefixes.token_hashes`.

        Raises: ValueError, EngineDeadError: none is left.
        """
        self.ensure_alive()
        return self._engine_for(None, None, tokens, *beside)

    def send_kv(self, rank: int, message: ToEngine) -> None:
        """Raises: EngineDeadError, RequestError: it cannot be sent to."""
        self.ensure_alive()
        self._send(rank, EngineCoreRequestType.KV, *self._encoder.encode(message))

    def _engine_for(self, rank: int | None, pin: str | None, tokens: Sequence[int], *beside: str) -> int:
        """tokens, beside: of its prompt. Raises: ValueError: the rank does not exist."""
        (only,) = self._ranks()
        if rank not in (None, only):
            raise ValueError(f"data_parallel_rank is {rank}; the only engine is {only}")
        return only

    def _ranks(self) -> Sequence[int]:
        return sorted(self._engines)

    def _add(self, request: EngineCoreRequest, rank: int | None, pin: str | None) -> int:
        self.ensure_alive()
        name = request.request_id
        if name in self.reqs_in_flight:
            raise RequestError("duplicate_request", "a request with this id is being computed", request_id=name)
        body = self._encoder.encode(request)
        chosen = self._engine_for(
            request.data_parallel_rank if rank is None else rank,
            request.pin or None if pin is None else pin,
            request.prompt_token_ids,
            request.cache_salt,
            request.adapter,
        )
        header = msgspec.msgpack.encode(AddHeader(name, self.client_index))
        self._send(chosen, EngineCoreRequestType.ADD, header, *body)
        self.reqs_in_flight[name] = chosen
        return chosen

    def _extend(self, request_id: str, more: Extension) -> None:
        self.ensure_alive()
        rank = self.reqs_in_flight.get(request_id)
        if rank is not None:  # else it has ended
            header = msgspec.msgpack.encode(AddHeader(request_id, self.client_index))
            self._send(rank, EngineCoreRequestType.EXTEND, header, *self._encoder.encode(more))

    def _release(self, request_ids: Iterable[str]) -> None:
        """Release held requests. Ids that are not in flight are left out, as in `_abort`."""
        self.ensure_alive()
        for name in request_ids:
            rank = self.reqs_in_flight.get(name)
            if rank is not None:
                self._send(rank, EngineCoreRequestType.RELEASE, msgspec.msgpack.encode([name]))

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests. Ids that are not in flight are left out: an abort may come after the end."""
        by_engine: dict[int, list[str]] = {}
        for name in request_ids:
            rank = self.reqs_in_flight.pop(name, None)
            if rank is not None and rank in self._engines:
                by_engine.setdefault(rank, []).append(name)
        for rank, names in by_engine.items():
            with contextlib.suppress(EngineDeadError):  # then they are over
                self._send(rank, EngineCoreRequestType.ABORT, msgspec.msgpack.encode(names))

    def _call(self, rank: int, method: str, arguments: Sequence[Any]) -> int:
        """Returns: the id of the call."""
        self.ensure_alive()
        call = UtilityCall(next(self._calls), method, self.client_index)
        body = self._encoder.encode(list(arguments))
        self._send(rank, EngineCoreRequestType.UTILITY, msgspec.msgpack.encode(call), *body)
        return call.call_id

    def _send(self, rank: int, kind: EngineCoreRequestType, *frames: Buffer) -> None:
        try:
            self._input.send([identity(rank), kind.value, *frames])
        except PeerError as error:
            if rank not in self._engines or self._engines[rank].exit_code is not None:
                raise EngineDeadError(f"engine {rank} has ended") from error
            raise RequestError("unavailable", f"engine {rank}: {error}") from error

    # --- outputs --------------------------------------------------------------------------------------------------

    def _take(self, on_utility: Callable[[UtilityOutput], None]) -> list[EngineCoreOutputs]:
        """All that has come from engines. The caller that passes it on calls `_note`."""
        taken = []
        while (frames := self._early.popleft() if self._early else self._output.receive()) is not None:
            if self._take_greeting(frames):
                self._on_greeting(frames)
                continue
            if bytes(frames[0]) == ENGINE_CORE_DEAD:
                taken.extend(self._take_death(frames[1:]))
                continue
            try:
                if bytes(frames[0]) == KV:
                    self._take_kv(bytes(frames[1]), frames[2:])
                    continue
                outputs = self._decoder.decode(frames)
            except ProtocolError as error:
                self.misread += 1
                log.warning("dropped a message of an engine: %s", error)
                continue
            self._silent[outputs.engine_index] = 0
            if outputs.scheduler_stats is not None and outputs.engine_index in self._engines:
                self.stats[outputs.engine_index] = outputs.scheduler_stats
                self.on_stats()
            if outputs.scheduled:
                self.on_scheduled(outputs.scheduled)
            if outputs.utility_output is not None:
                on_utility(outputs.utility_output)
            elif outputs.outputs or outputs.refused:
                taken.append(outputs)
        return taken

    def _take_kv(self, name: bytes, frames: Sequence[memoryview]) -> None:
        """Raises: ProtocolError: it cannot be understood."""
        message = self._kv.decode(frames)
        for rank in self._ranks():
            if name == identity(rank):
                self._silent[rank] = 0
                self.on_kv(rank, message)

    def _take_death(self, frames: Sequence[memoryview]) -> list[EngineCoreOutputs]:
        """An engine reports that it ends: sooner than its process does."""
        for rank in self._ranks():
            if frames and bytes(frames[0]) == identity(rank):
                return self._on_dead(rank, f"engine {rank} has failed")
        return []

    def _note(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Requests that end with these outputs are in flight no more."""
        for output in outputs.outputs:
            if output.finish is not None:
                self.reqs_in_flight.pop(output.request_id, None)
        for refused in outputs.refused:
            self.reqs_in_flight.pop(refused.request_id, None)
        return outputs

    def _ended(self) -> list[int]:
        """Ranks whose processes have ended and whose ends were not noticed."""
        return [rank for rank, one in self._engines.items() if one.exit_code is not None]

    def _close(self, *, drain_s: float = 0.0) -> None:
        self._dead = self._dead or EngineDeadError("the client is closed")
        own = [one for one in self._engines.values() if isinstance(one, EngineProcess)]
        launching.end(own, within_s=max(drain_s, END_WITHIN_S))
        for one in self._engines.values():
            one.close()
        self._engines.clear()
        self._input.close()
        self._output.close()
        self._context.close()
        self._folder.remove()
        self._finalizer.detach()


def result_of(output: UtilityOutput) -> Any:
    """Raises: UtilityFailed."""
    if output.failure is not None:
        raise UtilityFailed(output.failure)
    return output.result


def lost(requests: Iterable[str], reason: str) -> EngineCoreOutputs:
    """The outputs of requests whose engine has ended while others go on."""
    return EngineCoreOutputs(refused=tuple(Refused(name, "stage_failed", reason) for name in requests))


def _kill(engines: dict[int, EngineProcess | ForeignProcess], folder: multipart.Folder) -> None:
    """A client was collected, or its process ends, without `close`."""
    for one in engines.values():
        one.close()
    folder.remove()
