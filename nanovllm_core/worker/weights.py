"""From safetensors to parameters, with nothing missing, nothing left over and nothing twice.

First the headers of all files are read and every name and shape is checked, which takes
milliseconds; only then do threads copy the tensors to where the parameters live.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanovllm_core.errors import PluginLoadError, WeightsError, shown
from nanovllm_core.interfaces.model import CausalLM
from nanovllm_core.layers import ModelParameter
from nanovllm_core.layers.module import ShardId

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_ROPE_BUFFER = ".rotary_emb.inv_freq"
"""Follows from config.json: Llama 1 and 2, Moonlight and Kimi were saved with it."""
_MAX_NAMES = 8
_LOADERS = 4
"""Threads that copy tensors."""
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_FLOAT8, _SCALES = "F8_E4M3", "_scale_inv"
"""A dtype of `CausalLM.weight_block_size`, and what the names of its scales end in."""
_PARTS = ("weight_loader", "shard_shapes", "dummy_mean", "dummy_std")

_Sources = dict[tuple[str, ShardId], tuple[str, tuple[ShardId, ...]]]
"""(our module, shard) -> the checkpoint's module, and all shards that it holds, in order."""

_Headers = dict[Path, dict[str, tuple[tuple[int, ...], str]]]
"""By file and by the name of a tensor: its shape and dtype."""

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""


def load_weights(
    model: nn.Module, checkpoint_dir: str | Path, *, tied: bool, progress: Progress | None = None
) -> None:
    """Fill every parameter of a `CausalLM` from the safetensors files of a folder.

    Reads `model.safetensors`, or the files that `model.safetensors.index.json` lists, as
    transformers does; with neither every `model*.safetensors`, or else every `*.safetensors`.
    Others beside these, such as `consolidated.safetensors`, are left alone.
    `tied`: the embedding and the head share a parameter. It is loaded under its first name, or
    under the other where the files lack the first, as those of safetensors' `save_model` do. A
    second copy is left out. Tensors are converted to the parameter's dtype; float8 is multiplied by
    its scales, for a model with a `weight_block_size`.
    Raises WeightsError, before anything is copied, for weights that are missing, unexpected,
    double, quantised or of the wrong shape, for a second copy that differs, and for files that are
    missing or cannot be read.
    The caller calls `finalize_layers` afterwards.
    """
    folder = Path(checkpoint_dir)
    headers = _read_headers(_weight_files(folder))
    files = {name: file for file, header in headers.items() for name in header}
    slots, aliases = _slots(model, tied, files)
    unwanted = {*aliases, *cast(CausalLM, model).ignored_weights}
    for alias, first in aliases.items():
        if alias in files and first not in files:
            slots[alias] = slots.pop(first)
    block_size: Sequence[int] = getattr(model, "weight_block_size", None) or ()
    shapes = {name: slot.shape for name, slot in slots.items()}
    if block_size:
        shapes |= _scale_shapes(shapes, headers, block_size)
    _check(folder, shapes, unwanted, headers, files)
    _check_copies(model, files)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(_open(file)) for file in headers}

        def read(name: str) -> Tensor:
            with _reading(files[name]):
                tensor: Tensor = opened[files[name]].get_tensor(name)
            scales = name + _SCALES
            return _scaled(tensor, read(scales), block_size) if scales in shapes else tensor

        pool = ThreadPoolExecutor(_LOADERS)
        stack.callback(pool.shutdown, cancel_futures=True)
        # As they lie in the files.
        loads = [pool.submit(slots[n].load, partial(read, n)) for n in files if n in slots]
        for done, load in enumerate(as_completed(loads), start=1):
            load.result()
            if progress is not None:
                progress(done, len(loads))


def check_finite(model: nn.Module, checkpoint_dir: str | Path) -> None:
    """Raise WeightsError for parameters that hold NaN or infinity: their model writes nonsense.

    Reads every parameter once, and takes no memory, for a sum shows both.
    """
    parameters = dict(model.named_parameters())
    sums = torch.stack([one.sum(dtype=torch.float32) for one in parameters.values()]).tolist()
    suspects = [name for name, one in zip(parameters, sums, strict=True) if not math.isfinite(one)]
    # The sum of huge numbers may overflow where none of them is infinite.
    if wrong := [name for name in suspects if not parameters[name].isfinite().all()]:
        raise WeightsError(
            f"{len(wrong)} of the {len(parameters)} weights from {checkpoint_dir} are NaN or "
            f"infinite in {parameters[wrong[0]].dtype}: {_some(wrong)}; download the checkpoint "
            "again, or choose dtype: bfloat16 where the numbers are too large for float16"
        )


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter with random numbers of a sane scale. All lie on one device.

    The same seed gives the same weights on the same kind of device. Norms are 1, the rest is
    normal with a standard deviation of 0.02, so that hidden states stay finite; routers have 0.05.
    """
    parameters = dict(model.named_parameters())
    device = next((one.device for one in parameters.values()), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in parameters.items():
        one = _checked(name, parameter)
        one.normal_(one.dummy_mean, one.dummy_std, generator=generator)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The target of a tensor of this shape: a shard, or several, one below the other."""

    parameter: ModelParameter
    shape: tuple[int, ...]
    shard_ids: tuple[ShardId, ...]
    lock: Lock
    """Of the parameter."""
    stream: torch.cuda.Stream | None
    """Of the thread that starts the worker, with its GPU; None of a CPU."""

    @torch.inference_mode()
    def load(self, read: Callable[[], Tensor]) -> None:
        """Called by threads, but for one parameter by one at a time; `read` gives the tensor."""
        on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with self.lock, on_stream:
            shapes = [self.parameter.shard_shapes[one] for one in self.shard_ids]
            parts = read().flatten().split([math.prod(shape) for shape in shapes])
            for shard_id, part, shape in zip(self.shard_ids, parts, shapes, strict=True):
                self.parameter.weight_loader(self.parameter, part.view(shape), shard_id)


def _slots(
    model: nn.Module, tied: bool, files: Container[str]
) -> tuple[dict[str, _Slot], dict[str, str]]:
    """Every name a checkpoint must hold, and the further names of parameters that have several."""
    contract = cast(CausalLM, model)
    sources: _Sources = {}
    for source, entry in contract.packed_modules.items():
        if not (isinstance(entry, tuple) and len(entry) == 2):
            raise PluginLoadError(
                f"packed_modules[{source!r}] of {type(model).__name__} is {shown(entry)}; it must "
                'be a pair of our module and its shards, as in ("gate_up_proj", (0, 1))'
            )
        module, shards = entry
        together = (shards,) if isinstance(shards, str | int) else tuple(shards)
        sources |= {(module, shard_id): (source, together) for shard_id in together}
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: names[one] for name, one in every if name not in parameters}
    if aliases and not tied:
        raise PluginLoadError(
            f"{type(model).__name__} shares {', '.join(sorted(aliases))} with another parameter, "
            "but its shape() does not say tied_embeddings"
        )
    slots: dict[str, _Slot] = {}
    for name, parameter in parameters.items():
        checked = _checked(name, parameter)
        shapes = checked.shard_shapes
        stack = f"{name.removesuffix('.weight')}_proj"
        stacked = getattr(checked, "stacked_shape", None) if stack in files else None
        own = {stack: tuple(shapes)} if stacked else _checkpoint_tensors(name, shapes, sources)
        shared = Lock(), torch.cuda.current_stream(checked.device) if checked.is_cuda else None
        for source, shard_ids in own.items():
            first, *more = (shapes[one] for one in shard_ids)
            rows = (first[0] + sum(one[0] for one in more), *first[1:]) if more else first
            slots[source] = _Slot(checked, stacked or rows, shard_ids, *shared)
    return slots, aliases


def _checked(name: str, parameter: nn.Parameter) -> ModelParameter:
    if missing := [part for part in _PARTS if not hasattr(parameter, part)]:
        raise PluginLoadError(
            f"parameter {name} has no {', '.join(missing)}; build it with make_parameter of "
            "nanovllm_core.layers"
        )
    return cast(ModelParameter, parameter)


def _checkpoint_tensors(
    name: str, shards: Mapping[ShardId, object], sources: _Sources
) -> dict[str, tuple[ShardId, ...]]:
    """The tensors that fill a parameter, and the shards that each of them brings.

    "a.qkv_proj.weight" of q, k and v -> "a.q_proj.weight": ("q",), …: one whole component is
    exchanged.
    """
    if shards.keys() == {None}:
        return {name: (None,)}
    *path, module, kind = name.split(".")
    found = dict(sources[module, one] for one in shards if (module, one) in sources)
    named = [shard_id for together in found.values() for shard_id in together]
    if len(named) != len(shards) or set(named) != shards.keys():
        stated = [shard_id for ours, shard_id in sources if ours == module]
        raise PluginLoadError(
            f"packed_modules names the shards {stated} of {name}, which has {list(shards)}; name "
            "each of them once, with the module of the checkpoint that holds it, alone or with "
            "others (docs/write/model.md, Weights)"
        )
    return {".".join((*path, source, kind)): together for source, together in found.items()}


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        return _indexed_files(folder, index)
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if files:
        return files
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    raise WeightsError(
        _denied(folder)
        or f"{folder} holds no *.safetensors{', only ' + _some(others) if others else ''}; "
        "download the weights, convert them with transformers' save_pretrained, or choose "
        "load_format: dummy for random ones"
    )


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # Path.is_file raises where a name is longer than the file system takes.
        missing = [n for n in names if Path(n).name != n or not os.path.isfile(folder / n)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(
            _denied(index)
            or f"{index} cannot be read ({type(error).__name__}: {error}); download it again"
        ) from error
    if missing:
        raise WeightsError(
            f"{len(missing)} of the {len(names)} files that {index} lists are not in its folder: "
            f"{_some(missing)}; download the checkpoint again"
        )
    return [folder / name for name in names]


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    with _reading(file), safe_open(file, framework="pt", device="cpu") as tensors:
        yield tensors


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise WeightsError(
            _denied(file)
            or f"{file} ({size} bytes) is truncated or damaged ({error}); download it again"
        ) from error


def _denied(path: Path) -> str | None:
    """The message for a path that exists and may not be read; None for any other."""
    if not path.exists() or os.access(path, os.R_OK):
        return None
    return f"this user may not read {path}; change its permissions"


def _read_headers(files: Sequence[Path]) -> _Headers:
    headers: _Headers = {}
    for file in files:
        with _open(file) as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            headers[file] = {
                name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()
            }
    return headers


def _scale_shapes(
    shapes: Mapping[str, tuple[int, ...]], headers: _Headers, block_size: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The tensors of scales that the float8 weights of these files need."""
    return {
        name + _SCALES: tuple(
            -(-size // block) for size, block in zip(shape, block_size, strict=False)
        )
        for header in headers.values()
        for name, (shape, dtype) in header.items()
        if dtype == _FLOAT8 and name in shapes and len(shape) < 3
    }


def _scaled(tensor: Tensor, scales: Tensor, block_size: Sequence[int]) -> Tensor:
    """Each block of a matrix times its scale, in float32; blocks at the end may be smaller."""
    for dim, (block, size) in enumerate(zip(block_size, tensor.shape, strict=False)):
        scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return tensor.float() * scales


def _check(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    unwanted: set[str],
    headers: _Headers,
    files: dict[str, Path],
) -> None:
    folders = tuple(name for name in unwanted if name.endswith("."))
    problems = defaultdict(list, missing=[name for name in shapes if name not in files])
    for file, header in headers.items():
        for name, (shape, dtype) in header.items():
            if files[name] != file:
                problems["found twice"].append(f"{name} (in {file.name} and {files[name].name})")
            elif name not in shapes:
                # Such as transformers saves of 0 shared experts, and old exporters of ropes.
                is_void = 0 in shape or name.endswith(_ROPE_BUFFER)
                if not is_void and name not in unwanted and not name.startswith(folders):
                    problems["unexpected"].append(f"{name} (in {file.name})")
            elif shape != shapes[name]:
                problems["of the wrong shape"].append(
                    f"{name} (in {file.name}: {list(shape)}, the model's config.json wants "
                    f"{list(shapes[name])})"
                )
            elif dtype not in _DTYPES and not (dtype == _FLOAT8 and name + _SCALES in shapes):
                kind = "of a dtype that is not supported (quantised checkpoints are not)"
                problems[kind].append(f"{name} (in {file.name}: {dtype})")
    reasons = [f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names]
    remedy = "Check that config.json belongs to these weights, or download the checkpoint again"
    if any(name.startswith("model.language_model.") and name not in shapes for name in files):
        remedy = (
            "model.language_model.* is how transformers 5 names the text model of a larger one: "
            "save it there with save_original_format=True, or use one of the text model alone"
        )
    if reasons:
        raise WeightsError(
            f"the weights in {folder} do not fit the model: {'; '.join(reasons)}. {remedy}"
        )


def _check_copies(model: nn.Module, files: dict[str, Path]) -> None:
    """A tied head that the checkpoint stores too must be the embedding: only one is loaded."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = first.setdefault(parameter, name)
        if name == source or name not in files or source not in files:
            continue
        with _open(files[source]) as sources, _open(files[name]) as copies:
            loaded = sources.get_tensor(source).to(parameter.dtype)
            if not torch.equal(loaded, copies.get_tensor(name).to(parameter.dtype)):
                raise WeightsError(
                    f"{name} (in {files[name].name}) differs from {source}, with which config.json "
                    "ties it; set tie_word_embeddings: false there to use it"
                )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    rest = len(names) - _MAX_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
