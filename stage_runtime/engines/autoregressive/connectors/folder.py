"""A folder of blocks behind the engine: what one process has computed, it and others find after it has ended.

Blocks of prompts and answers are copied when they are full, in the order of steps, and written by a thread. A prompt
whose next blocks are in the folder waits until they are read. Blocks that are damaged, gone or late are computed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from torch import Tensor

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import layouts
from stage_runtime.engines.autoregressive.connectors.block_files import BlockFiles
from stage_runtime.engines.autoregressive.connectors.registry import Around, Built
from stage_runtime.engines.autoregressive.connectors.watch import Watch
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.kv_connector import Failure, Local, Post
from stage_runtime.errors import ConfigurationError, describe
from stage_runtime.rules.autoregressive.requests import Request
from stage_runtime.rules.autoregressive.steps import Row
from stage_runtime.rules.kv.handover import Load

log = logging.getLogger(__name__)

UNWRITTEN_NBYTES: Final = 64 << 20  # copies that wait for the disk; blocks beyond them are not kept
LOOK_S: Final = 10.0  # how late a block is found that another process has written
PATIENCE_S: Final = 10.0  # without a block, while some are waited for: the prompts are computed sooner then


class FolderConnector:
    """`KVConnector`."""

    def __init__(
        self,
        core: EngineCore,
        files: BlockFiles,
        block_nbytes: int,
        *,
        post: Post,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Looks into the folder. Raises: OSError."""
        self._core = core
        self._files = files
        self._block_nbytes = block_nbytes
        self._post = post
        self._clock = clock
        self._known = files.known()
        self._unsaved: set[bytes] = set()  #: Known ones that are not written yet, so not to be read.
        self._looked = clock()
        self._unwritten = 0  #: Bytes.
        self._loading: dict[str, Load] = {}
        self._moved = 0.0  #: When a block has come, or the first one was waited for.
        self._watch = Watch(self.look, PATIENCE_S / 2, post=post)  #: Armed while blocks are waited for.
        self._complained = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")
        for pool in (self._reader, self._writer):
            pool.submit(int)  # the thread starts now, as that of `Watch`
        self._loads = core.connect(self, post)

    # --- KVConnector: the engine's thread -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: EngineCoreRequest, made: Request, computed: int, whole: int) -> int:
        size = self._core.scheduler.limits.block_size
        if self._clock() - self._looked > LOOK_S:
            self._look()
        found = 0
        if made.rows is None:  # rows are named by this process alone
            for content in made.hash(size)[computed // size : whole // size]:
                if content not in self._known or content in self._unsaved:
                    break
                found += 1
        if not found:
            self._loads.compute_here(made.id, Local.ABSENT)
        return found * size

    def update_state_after_alloc(self, load: Load, request: EngineCoreRequest) -> None:
        if not self._loading:
            self._moved = self._clock()
        self._loading[load.request_id] = load
        self._arm()
        wanted = deque((index, load.hashes[index]) for index in load.missing)
        self._reader.submit(self._read, load, wanted)

    def load_finished(self, load: Load) -> None:
        self._loading.pop(load.request_id, None)

    def found_kv(self, row: Row) -> None: ...  # it was saved when it was computed

    def save_kv(self, row: Row) -> None:
        request, size = row.request, self._core.scheduler.limits.block_size
        if request.rows is not None or request.feeds_itself or request.private:
            return  # nobody would find its blocks
        full = request.hash(size)[: (row.start + row.count) // size]
        fresh = [at for at in range(row.start // size, len(full)) if full[at] not in self._known]
        fresh = fresh[: self._room]
        if not fresh:
            return
        nbytes = len(fresh) * self._block_nbytes
        self._unwritten += nbytes
        blocks, contents = [request.blocks[at] for at in fresh], [full[at] for at in fresh]
        self._known.update(contents)
        self._unsaved.update(contents)
        self._loads.counts["sent_blocks"] += len(fresh)
        self._loads.counts["sent_bytes"] += nbytes
        future = self._core.executor.call(lambda runner: [runner.pages.export([block]) for block in blocks])
        future.add_done_callback(partial(self._copied, contents, nbytes))

    @property
    def _room(self) -> int:
        """How many blocks may be copied now: one at least while none waits, however large it is."""
        return max((UNWRITTEN_NBYTES - self._unwritten) // self._block_nbytes, int(not self._unwritten))

    def request_finished(self, request: Request) -> None:
        self._loading.pop(request.id, None)

    def close(self) -> None:
        self._watch.close()
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()  # what was copied is kept

    def _look(self) -> None:
        self._looked = self._clock()
        self._writer.submit(self._look_again)

    def _told(self, known: set[bytes]) -> None:
        self._known = known | self._unsaved

    def _written(self, contents: Sequence[bytes], lost: Sequence[bytes], nbytes: int) -> None:
        self._unwritten -= nbytes
        self._unsaved.difference_update(contents)
        self._known.difference_update(lost)

    def _arm(self) -> None:
        if self._loading:
            self._watch.arm()

    def look(self) -> None:
        """Give up what a disk does not give."""
        if self._clock() - self._moved > PATIENCE_S:
            for request_id in list(self._loading):
                self._loads.fail(request_id, f"no block was read for {PATIENCE_S:g} s", Failure.SILENT)
        self._arm()

    def _fill(self, load: Load, index: int, flat: Tensor) -> None:
        self._moved = self._clock()
        if self._loading.get(load.request_id) is load:
            self._loads.fill(load.request_id, index, flat, 1)

    def _fail(self, load: Load, content: bytes, reason: str) -> None:
        self._known.discard(content)
        if self._loading.get(load.request_id) is load:
            self._loads.fail(load.request_id, reason, Failure.UNREADABLE)

    # --- other threads --------------------------------------------------------------------------------------------

    def _copied(self, contents: Sequence[bytes], nbytes: int, done: Future[list[Tensor]]) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._writer.submit(self._write, contents, nbytes, done)

    def _read(self, load: Load, wanted: deque[tuple[int, bytes]]) -> None:
        """One block, then those of other prompts that wait: no prompt waits for all of a long one."""
        index, content = wanted.popleft()
        if self._loading.get(load.request_id) is not load:
            return
        try:
            flat = self._files.read(content)
        except Exception as error:
            self._post(partial(self._fail, load, content, describe(error)))
            return
        self._post(partial(self._fill, load, index, flat))
        if wanted:
            self._reader.submit(self._read, load, wanted)

    def _write(self, contents: Sequence[bytes], nbytes: int, done: Future[list[Tensor]]) -> None:
        lost, due = list(contents), False
        try:
            for content, flat in zip(contents, done.result(), strict=True):
                due |= self._files.write(content, flat)
                lost.remove(content)
        except Exception as error:
            if not self._complained:
                log.warning("blocks are not kept in the folder: %s", describe(error))
            self._complained = True
        self._post(partial(self._written, contents, lost, nbytes))
        if due:
            self._look_again()

    def _look_again(self) -> None:
        try:
            known = self._files.known()
        except OSError as error:
            log.warning("the folder of blocks cannot be read: %s", describe(error))
            return
        self._post(partial(self._told, known))


def check(spec: Autoregressive, role: str) -> None:
    """Raises: ConfigurationError: the settings are wrong, or do not go together."""
    where, most = f"omni.Autoregressive(kv_folder={spec.kv_folder!r})", spec.kv_folder_bytes
    if type(most) is not int or most < 1:
        raise ConfigurationError(f"omni.Autoregressive(kv_folder_bytes={most!r}): a number of bytes, at least 1")
    if not spec.kv_folder:
        return
    if not os.path.isabs(spec.kv_folder):
        raise ConfigurationError(f"{where}: expected an absolute path")
    if spec.engine != "own":
        raise ConfigurationError(f"{where}: engine={spec.engine!r} keeps no blocks there: engine='own' alone does")
    if not spec.prefix_caching:
        raise ConfigurationError(f"{where}: blocks from it are found as a prefix, which prefix_caching=False excludes")


def connect(spec: Autoregressive, loaded: Built, around: Around) -> None:
    """Let an engine that does not run yet read and write blocks in a folder.

    Raises: ConfigurationError: the folder cannot be used, or the model's blocks cannot.
    """
    where = f"omni.Autoregressive(kv_folder={spec.kv_folder!r})"
    layouts.check(loaded.runner, where)
    nbytes, most = loaded.runner.pages.block_nbytes, spec.kv_folder_bytes
    if nbytes > most:
        raise ConfigurationError(
            f"omni.Autoregressive(kv_folder_bytes={most}): a block of this model has {nbytes} bytes"
        )
    layout = layouts.layout_of(loaded.runner, spec, loaded.weights)
    try:
        files = BlockFiles(spec.kv_folder, layout.digest, nbytes, most)
        FolderConnector(loaded.core, files, nbytes, post=around.post)
    except OSError as error:
        raise ConfigurationError(f"{where}: {describe(error)}") from error
