"""Hypothesis strategies for sound pipelines, as documents of the resource's ``spec``.

Here: graphs with joins, routes and streams, processes, tensor parallelism, shared GPUs with budgets, fusion,
refinements and cluster fields, sound by construction: nothing here asks the planner. Not here: unsound ones (tables
in the tests). Any room's tests may draw from it: ``@given(valid_specs.documents())``.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Document = dict[str, Any]

FUNCTIONS = st.sampled_from(["work:make", "pkg.mod:fn", "pkg.mod.fn", "a.b_c:D.e"])
WORDS = st.text("abcxyz_-. é\n'\":{}[]#&*!|>%@`0123456789", max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)
    | st.sampled_from(["y", "no", "1e3", "0o17", "2001-01-01", "null", "~", "", "1_000", ".5", "0x1F", "="])
    | WORDS
)
KEYS = st.sampled_from(["a", "b_c", "dEf", "on", "1", "x.y", "with space", "y", "1e3", "null"])
FREE = st.dictionaries(
    KEYS, st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)),
    max_size=4,
)  # fmt: skip
QUANTITIES = st.sampled_from(["500m", "2", "12Gi", "500M", "1.5Gi", "1e3", ".5", 4, 1073741824])


@st.composite
def documents(draw: st.DrawFn, *, max_stages: int = 8) -> Document:
    """The ``spec`` of a sound resource."""
    names = [
        draw(st.sampled_from(["s{}", "stage_{}", "x-{}"])).format(index)
        for index in range(draw(st.integers(1, max_stages)))
    ]
    stages = _graph(draw, names)
    _place(draw, stages)
    spec: Document = {"stages": stages}
    fused = _fuse(draw, stages)
    if fused:
        spec["fusedStages"] = fused
    _refine(draw, spec, stages, fused)
    _settings(draw, spec, names)
    if draw(st.booleans()):
        spec["stages"] = draw(st.permutations(stages))
    if spec["stages"][0]["name"] != names[0] or draw(st.booleans()):
        spec["entryStage"] = names[0]
    return spec


def _graph(draw: st.DrawFn, names: list[str]) -> list[Document]:
    """Edges run from earlier to later names only, and every name but the first has a parent."""
    stages: dict[str, Document] = {name: {"name": name, "factory": draw(FUNCTIONS)} for name in names}
    for index, name in enumerate(names[1:], 1):
        parents = draw(st.lists(st.sampled_from(names[:index]), min_size=1, max_size=3, unique=True))
        for parent in parents:
            kind = draw(st.sampled_from(["next", "next", "streamTo", "both"]))
            for field in ("next", "streamTo") if kind == "both" else (kind,):
                stages[parent].setdefault(field, []).append(name)
    for name in names:
        stage = stages[name]
        sources = [parent for parent in names if name in stages[parent].get("next", [])]
        _hooks(draw, stage, sources)
        if len(sources) > 1 and "waitFor" not in stage:  # takes one payload: routes choose who sends it
            for parent in sources:
                stages[parent].setdefault("routeFn", draw(FUNCTIONS))
    return list(stages.values())


def _hooks(draw: st.DrawFn, stage: Document, sources: list[str]) -> None:
    if not stage.get("next"):
        stage["terminal"] = True
    elif draw(st.booleans()):
        stage["routeFn"] = draw(FUNCTIONS)
    if bool(sources) and draw(st.booleans()):
        stage["waitFor"] = draw(st.permutations(sources))
        stage["mergeFn"] = draw(FUNCTIONS)
        if draw(st.booleans()):
            stage["waitForFn"] = draw(FUNCTIONS)
    if stage.get("streamTo") and draw(st.booleans()):
        stage["streamDoneToFn"] = draw(FUNCTIONS)
    if stage.get("streamTo") and draw(st.booleans()):
        stage["streamAtEnd"] = [draw(st.sampled_from(stage["streamTo"]))]
    targets = sorted({*stage.get("next", []), *stage.get("streamTo", [])})
    if bool(targets) and draw(st.booleans()):
        stage["projectPayload"] = {draw(st.sampled_from(targets)): draw(FUNCTIONS)}
    if draw(st.booleans()):
        stage["factoryArgs"] = draw(FREE)
    if draw(st.booleans()):
        stage["relay"] = {"credits": draw(st.integers(1, 8)), "slotSizeMb": draw(st.integers(1, 1024))}


def _place(draw: st.DrawFn, stages: list[Document]) -> None:
    """Processes, each with at most one GPU; some stages with ranks; budgets wherever a GPU has two users."""
    gpu_of: dict[str, int | None] = {}
    for index, stage in enumerate(stages):
        ranks = draw(st.sampled_from([1, 1, 1, 2, 3]))
        if ranks > 1:
            stage["tpSize"] = ranks
            stage["gpu"] = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks, unique=True))
            if draw(st.booleans()):
                stage["process"] = f"ranks{index}"
            continue
        process = draw(st.sampled_from([f"own_{index}", "p0", "p1", "p2"]))
        gpu = gpu_of.setdefault(process, draw(st.none() | st.integers(0, 5)))
        stage["process"] = process
        if gpu is not None and draw(st.booleans()):
            stage["gpu"] = [gpu]
    _budget(draw, stages)


def _budget(draw: st.DrawFn, stages: list[Document]) -> None:
    by_bytes = draw(st.booleans())
    users = {gpu: [stage for stage in stages if gpu in stage.get("gpu", [])] for gpu in range(6)}
    for stage in stages:
        most = max((len(users[gpu]) for gpu in stage.get("gpu", [])), default=0)
        if most > 1 or (most and draw(st.booleans())):
            share = round(0.94 / len(stages), 3)
            stage["gpuMemory"] = {"bytes": draw(QUANTITIES)} if by_bytes else {"fraction": share}


def _fuse(draw: st.DrawFn, stages: list[Document]) -> list[list[str]]:
    """Fuse at most one pair that may share a process."""
    by_name = {stage["name"]: stage for stage in stages}
    pairs = []
    for stage in stages:
        after = by_name[stage["next"][0]] if len(stage.get("next", [])) == 1 else None
        if after is None or "tpSize" in stage or "tpSize" in after:
            continue
        alone = [other for other in stages if after["name"] in other.get("next", [])] == [stage]
        joined = [other for other in stages if other.get("process") in (stage["process"], after["process"])]
        if alone and len({gpu for other in joined for gpu in other.get("gpu", [])}) <= 1:
            pairs.append([stage["name"], after["name"]])
    return [draw(st.sampled_from(pairs))] if bool(pairs) and draw(st.booleans()) else []


def _refine(draw: st.DrawFn, spec: Document, stages: list[Document], fused: list[list[str]]) -> None:
    """Refinements; one replica count for all, because groups that share a GPU must agree."""
    by_name = {stage["name"]: stage for stage in stages}
    absorbed = {by_name[name]["process"] for pair in fused for name in pair[1:]}
    processes: set[Any] = {stage.get("process", stage["name"]) for stage in stages}
    groups = sorted(processes - absorbed)
    replicas = draw(st.integers(1, 3))
    refined = []
    for group in draw(st.lists(st.sampled_from(groups), unique=True, max_size=4)) if groups else []:
        fields: Document = {"name": group}
        if draw(st.booleans()):
            fields["replicas"] = replicas
        if draw(st.booleans()):
            fields["resources"] = {"requests": draw(st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES))}
        if draw(st.booleans()):
            fields["sharedMemory"] = draw(st.sampled_from(["1Gi", "512Mi", 65536]))
        if draw(st.booleans()):
            fields["drain"] = {"timeoutSeconds": draw(st.integers(1, 600))}
        refined.append(fields)
    if refined:
        spec["processGroups"] = refined


def _settings(draw: st.DrawFn, spec: Document, names: list[str]) -> None:
    optional: dict[str, st.SearchStrategy[Any]] = {
        "modelPath": st.sampled_from(["some/model", "/models/x", "1"]),
        "serves": st.lists(st.sampled_from(["chat", "speech", "transcription", "realtime"]), unique=True),
        "accepts": st.lists(st.sampled_from(["tools", "n", "logprobs"]), unique=True),
        "relayBackend": st.sampled_from(["auto", "shm", "tcp", "nixl"]),
        "runtimeOverrides": st.dictionaries(st.sampled_from(names), FREE, max_size=2),
        "envDefaults": st.dictionaries(st.sampled_from(["A", "HF_HOME", "b.c-d"]), WORDS, max_size=3),
        "env": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["A", "B"]), "value": WORDS}),
            max_size=2,
            unique_by=lambda variable: variable["name"],
        ),
        "coordinator": st.fixed_dictionaries(
            {}, optional={"retries": st.integers(0, 3), "http": st.just({"port": 80})}
        ),
        "control": st.sampled_from([{}, {"heartbeatSeconds": 0.5}, {"security": {"mode": "None"}}]),
        "networkPolicy": st.sampled_from([{}, {"ingressFrom": [{"podSelector": {}}]}]),
        "restartedAt": st.sampled_from(["", "2026-01-01T00:00:00Z"]),
        "profiling": st.sampled_from([{}, {"maxSeconds": 60}, {"storage": {"emptyDir": {}}}]),
        "code": st.just({"inline": {"work.py": "def make():\n    return lambda payload: payload\n"}}),
    }
    for field, strategy in optional.items():
        if draw(st.integers(0, 3)) == 0:
            spec[field] = draw(strategy)
