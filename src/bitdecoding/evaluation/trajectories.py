"""Reference trajectories: prompts with the reference model's own greedy continuation, as a plain JSON file.

The file holds ``{"model_id", "revision", "trajectories": [{"name", "prompt_length", "token_ids"}, ...]}``, so that any
other implementation can be run on the same tokens.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache

from bitdecoding.errors import InvalidInputError
from bitdecoding.integrations.transformers.attention import attention_of, reference_implementation
from bitdecoding.integrations.transformers.forward import forward
from bitdecoding.models import LoadedModel, model_shape

_log = logging.getLogger(__name__)

__all__ = ["Trajectory", "generate_trajectory", "load_trajectories", "save_trajectories"]


@dataclass(frozen=True)
class Trajectory:
    """A prompt and its reference continuation.

    Attributes:
        name: shown in tables; unique in a file.
        prompt_length: tokens of the prompt.
        token_ids: prompt and continuation.
    """

    name: str
    prompt_length: int
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_length < len(self.token_ids):
            raise InvalidInputError(
                f"trajectory {self.name}: prompt_length must be within 1..{len(self.token_ids) - 1}, "
                f"got {self.prompt_length}"
            )

    @property
    def steps(self) -> int:
        """Decode steps: tokens of the continuation."""
        return len(self.token_ids) - self.prompt_length

    @property
    def digest(self) -> str:
        """Hash of the tokens, which says whether two results belong to the same trajectory."""
        return hashlib.sha256(json.dumps([self.prompt_length, *self.token_ids]).encode()).hexdigest()[:16]


@torch.inference_mode()
def generate_trajectory(
    loaded: LoadedModel, name: str, prompt_ids: Sequence[int], steps: int, *, on_token: Callable[[], None] | None = None
) -> Trajectory:
    """Continue a prompt greedily with the reference model (16-bit cache), past any end-of-text token.

    Raises:
        InvalidInputError: empty prompt, no steps, or prompt and continuation longer than the model's context.
    """
    context = model_shape(loaded.model.config).max_context
    if not prompt_ids:
        raise InvalidInputError(f"prompt {name}: is empty; give at least one token")
    if steps < 1:
        raise InvalidInputError(f"steps: must be at least 1, got {steps}")
    if len(prompt_ids) + steps > context:
        raise InvalidInputError(
            f"prompt {name}: {len(prompt_ids)} tokens and {steps} steps exceed the model's context of {context}; "
            f"shorten the prompt"
        )
    cache = DynamicCache(config=loaded.model.config)
    ids = list(prompt_ids)
    fed = list(ids)
    with attention_of(loaded.model, reference_implementation(loaded.model)):
        for _ in range(steps):
            ids.append(int(forward(loaded.model, torch.tensor([fed]), cache, last_only=True)[0, -1].argmax()))
            fed = ids[-1:]
            if on_token is not None:
                on_token()
    return Trajectory(name, len(prompt_ids), tuple(ids))


def save_trajectories(trajectories: Sequence[Trajectory], path: str | os.PathLike[str], loaded: LoadedModel) -> None:
    """Write trajectories to a JSON file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    content = {
        "model_id": loaded.model_id,
        "revision": loaded.revision,
        "trajectories": [asdict(t) for t in trajectories],
    }
    Path(path).write_text(json.dumps(content) + "\n")


def load_trajectories(path: str | os.PathLike[str], loaded: LoadedModel | None = None) -> list[Trajectory]:
    """Read trajectories.

    Args:
        path: a file of `save_trajectories`, or one that holds the bare list.
        loaded: the model that shall follow them; its vocabulary must hold every token, and if the file names other
            weights, that is logged as a warning, since they are then no greedy trajectories of this model.

    Raises:
        InvalidInputError: missing or malformed file, duplicate names, no continuation, token out of the vocabulary.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise InvalidInputError(f"trajectories: no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidInputError(f"trajectories: {path} is not JSON ({error})") from None
    rows = content.get("trajectories") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows:
        raise InvalidInputError(f"trajectories: {path} holds none")
    vocab_size = None
    if loaded is not None:
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        made_by = content.get("revision") if isinstance(content, dict) else None
        if made_by not in (None, loaded.revision):
            _log.warning("trajectories: %s were made by other weights than %s's", path, loaded.model_id)
    trajectories = [_parse(path, index, row, vocab_size) for index, row in enumerate(rows)]
    names = [t.name for t in trajectories]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"trajectories: {path} has two of the same name; names must differ")
    return trajectories


def _parse(path: Path, index: int, row: object, vocab_size: int | None) -> Trajectory:
    where = f"trajectories: {path}, entry {index}"
    if not isinstance(row, dict):
        raise InvalidInputError(f"{where}: expected an object with prompt_length and token_ids")
    ids, prompt = row.get("token_ids"), row.get("prompt_length")
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise InvalidInputError(f"{where}: token_ids must be a list of non-negative integers")
    if not isinstance(prompt, int) or not 1 <= prompt < len(ids):
        raise InvalidInputError(f"{where}: prompt_length must be within 1..{len(ids) - 1}, got {prompt}")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise InvalidInputError(f"{where}: token {max(ids)} is beyond the vocabulary of {vocab_size}")
    return Trajectory(str(row.get("name", f"trajectory-{index}")), prompt, tuple(ids))
