"""The processor time of an example at full load: of the stages' own work, or of the runtime and the coordinator.

    python -m benchmarks.accounting [chat] [voice] [--seconds 30] [--json]

`omni up` runs the example, and clients keep it busy: 16 streamed chats of 128 tokens, or 3 spoken questions that are
answered aloud. Linux counts each thread's user and system time. Then py-spy looks at all Python threads for as long, a
hundred times a second, and a thread's time is split as these samples are: a sample belongs to the innermost file that
is the runtime's or the stage's, so a chunk that an engine hands on counts as the runtime's from there. Nothing is
counted while py-spy looks: it takes a third of two processors, and the processes' caches. The engine
(`engines/autoregressive`) is the stage's work, as a model's library would be. Threads without Python are ZeroMQ's, by
name, or compute. The supervisor and the coordinator are the runtime's altogether. Clients are not counted.

Run it with nothing beside it: beats, timers and wake-ups cost the runtime as much when the stages get less done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TextIO

import httpx
import msgspec
import psutil

from examples.voice import demo
from stage_runtime.processes.starting.launching import free_port

ROOT: Final = Path(__file__).resolve().parents[1]
RUNTIME: Final = f"{ROOT}/stage_runtime/"
ENGINE: Final = f"{ROOT}/stage_runtime/engines/autoregressive/"
STDLIB: Final = sysconfig.get_path("stdlib")
SAMPLES_PER_S: Final = 100
WARM_S: Final = 8.0
READY_S: Final = 300.0
GOALS: Final = {"chat": 0.03, "voice": 0.02}
CLIENTS: Final = {"chat": 16, "voice": 3}


class Thread(msgspec.Struct):
    """The time that a thread used. runtime: the part of its seconds that was the runtime's, from 0 to 1."""

    process: str
    name: str
    seconds: float
    runtime: float


def tool(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).with_name(name))


def is_runtimes(frames: Sequence[str]) -> bool | None:
    """Whether the innermost frame that is anybody's is the runtime's; None if all are a library's.

    frames: outermost first, as py-spy writes them: ``function (file:line)``.
    """
    for frame in reversed(frames):
        path = frame.rpartition(" (")[2]
        if path.startswith(RUNTIME):
            return not path.startswith(ENGINE)
        if not path.startswith(("<", STDLIB)) and "/site-packages/" not in path:
            return False
    return None


def shares(raw: str) -> dict[int, tuple[str, float]]:
    """Each thread's name and the share of its samples that is the runtime's, by its id. raw: py-spy's output."""
    names: dict[int, str] = {}
    found: dict[int, Counter[bool]] = {}
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        spelled, _, name = thread.removeprefix("thread (").partition(")")
        number = int(spelled)
        names[number] = name.removeprefix(": ") or "native"
        found.setdefault(number, Counter())[bool(is_runtimes(frames))] += int(count)
    return {number: (names[number], counted[True] / counted.total()) for number, counted in found.items()}


@contextlib.contextmanager
def up(example: str) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """The example, ready. Gives its address and its processes by name."""
    port = free_port()
    command = [tool("omni"), "up", "-f", f"examples/{example}/pipeline.yaml", "--port", str(port), "--no-auth", "--cpu"]
    with tempfile.TemporaryFile("w+") as log:
        running = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            _until_ready(running, f"http://127.0.0.1:{port}/health", log)
            named = {"omni up": psutil.Process(running.pid)}
            for child in running.children(recursive=True):
                words = child.cmdline()
                if words[-2:-1] in (["coordinator"], ["stage"]):
                    named[" ".join(words[-2:]) if words[-2] == "stage" else "coordinator"] = child
            yield f"http://127.0.0.1:{port}", named
        finally:
            running.terminate()
            running.wait(timeout=60)


def _until_ready(running: psutil.Popen, url: str, log: TextIO) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up and running.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    log.seek(0)
    raise SystemExit(f"the example did not get ready; it wrote:\n{log.read()}")


def chat(url: str) -> None:
    """Ask for one streamed answer of 128 tokens, and read it."""
    message = {"role": "user", "content": "Tell me a story of the sea."}
    body = {"messages": [message], "max_tokens": 128, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=READY_S, trust_env=False) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass


def voice(url: str) -> None:
    """Ask the recorded question, and hear the answer."""
    demo.ask(url, (ROOT / "examples/voice/question.wav").read_bytes())


ASK: Final[dict[str, Callable[[str], None]]] = {"chat": chat, "voice": voice}


def measured(example: str, seconds: float) -> tuple[list[Thread], int]:
    """The time of each thread of the example at full load, and how many answers ended meanwhile."""
    answered = 0
    stop = threading.Event()
    counting = threading.Lock()
    failed: list[Exception] = []

    def keep_asking(url: str) -> None:
        nonlocal answered
        while not stop.is_set():
            try:
                ASK[example](url)
            except (httpx.HTTPError, demo.Failed) as error:
                failed.append(error)
                return
            with counting:
                answered += 1

    with up(example) as (url, processes):
        ASK[example](url)  # when it is answered, all stages are loaded
        clients = [threading.Thread(target=keep_asking, args=(url,)) for _ in range(CLIENTS[example])]
        for client in clients:
            client.start()
        time.sleep(WARM_S)
        before, at_first = answered, {name: _used(process) for name, process in processes.items()}
        time.sleep(seconds)
        at_last = {name: _used(process) for name, process in processes.items()}
        ended = answered - before
        raw = _sampled(processes, seconds)
        found = [
            thread
            for name, process in processes.items()
            for thread in _split(name, process, at_first[name], at_last[name], raw[name])
        ]
        stop.set()
        for client in clients:
            client.join()
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return found, ended


def _used(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def _sampled(processes: dict[str, psutil.Process], seconds: float) -> dict[str, str]:
    """py-spy's stacks of each process's busy threads, while they go on."""
    with tempfile.TemporaryDirectory() as folder:
        spies = {}
        for index, (name, process) in enumerate(processes.items()):
            file = f"{folder}/{index}"
            command = [tool("py-spy"), "record", "--pid", str(process.pid), "--duration", str(round(seconds))]
            command += ["--rate", str(SAMPLES_PER_S), "--threads", "--full-filenames", "--nonblocking"]
            command += ["--format", "raw", "--output", file]
            spies[name] = (subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE), Path(file))
        for name, (spy, _) in spies.items():
            _, said = spy.communicate()
            if spy.returncode:
                raise SystemExit(f"py-spy could not look at {name}: {said.decode()}")
        return {name: file.read_text() for name, (_, file) in spies.items()}


def _split(
    name: str, process: psutil.Process, before: dict[int, float], after: dict[int, float], raw: str
) -> Iterator[Thread]:
    known = shares(raw)
    for number, used in after.items():
        seconds = used - before.get(number, 0.0)
        if seconds <= 0:
            continue
        native = Path(f"/proc/{process.pid}/task/{number}/comm").read_text().strip()
        title, share = known.get(number, (native, float(native.startswith("ZMQ"))))
        yield Thread(name, title, seconds, share if name.startswith("stage ") else 1.0)


def report(example: str, threads: Sequence[Thread], answers: int) -> dict[str, object]:
    """Print the account of an example. Returns it."""
    total = sum(thread.seconds for thread in threads)
    ours = sum(thread.seconds * thread.runtime for thread in threads)
    print(f"{example}: {answers} answers, {total:.1f} s of processor time")
    print(f"{'process':>20} {'thread':>24} {'seconds':>8} {'runtime':>8}")
    for thread in sorted(threads, key=lambda one: -one.seconds):
        if thread.seconds >= total / 1000:
            print(f"{thread.process:>20} {thread.name[:24]:>24} {thread.seconds:8.2f} {thread.runtime:8.1%}")
    print(f"runtime and coordinator: {ours / total:.1%} of it (goal {GOALS[example]:.0%})\n", flush=True)
    return {"share": ours / total, "seconds": total, "answers": answers, "threads": msgspec.to_builtins(threads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", default=sorted(ASK), help="chat, voice; both unless given")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON at the end")
    arguments = parser.parse_args()
    if unknown := set(arguments.examples) - set(ASK):
        parser.error(f"not an example with an account: {', '.join(sorted(unknown))}; there are {', '.join(ASK)}")
    found = {example: report(example, *measured(example, arguments.seconds)) for example in arguments.examples}
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
