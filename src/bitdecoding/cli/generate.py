"""`bitdecoding generate`: continue a prompt over a quantized cache."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitdecoding.cli.calibrations import choose_calibration
from bitdecoding.cli.console import note
from bitdecoding.cli.options import (
    AllowMismatch,
    CalibrationChoice,
    Device,
    Dtype,
    Model,
    open_model,
    parse_recipe,
    read_text,
)
from bitdecoding.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache

    from bitdecoding.models import LoadedModel

__all__ = ["generate"]


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to continue; '-' reads standard input.", show_default=False),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read the prompt from a file; '-' is standard input.", show_default=False),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="How to quantize: a preset of `bitdecoding info` or a JSON file.")
    ] = "bitdecoding-nvfp4",
    arithmetic: Annotated[
        str | None,
        typer.Option(
            metavar="native|w16",
            help="Query and probabilities against FP4 pages: native keeps both in FP4, w16 both in 16 bits.",
            show_default="the recipe's",
        ),
    ] = None,
    calibration: CalibrationChoice = None,
    allow_mismatch: AllowMismatch = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt as a user's message into the model's chat template, or continue it as it is.",
            show_default="--chat if there is a template",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 takes the most likely token.")] = 0.0,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Continue a prompt over a 4-bit KV cache, and say how much memory the cache took.

    The text goes to standard output as it is made, the memory to standard error. After the prompt's exact prefill all
    full pages of 128 tokens are quantized; the newest tokens stay in 16 bits.
    """
    from bitdecoding.integrations.transformers import FP4Cache
    from bitdecoding.integrations.transformers.cache import check_model

    text = _prompt_text(prompt, prompt_file)
    chosen = parse_recipe(recipe)
    if arithmetic is not None:
        chosen = chosen.with_arithmetic(arithmetic)
    loaded = open_model(model, device, dtype)
    shape = check_model(loaded.model)
    chosen.check_head_dim(shape.head_dim)
    ids = _token_ids(loaded, text, chat)
    if ids.shape[-1] + max_new_tokens > shape.max_context:
        raise InvalidInputError(
            f"prompt: {ids.shape[-1]} tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{shape.max_context}; shorten it or lower --max-new-tokens"
        )
    statistics, (chosen,) = choose_calibration(loaded, calibration, [chosen], allow_mismatch=allow_mismatch)
    cache = FP4Cache.for_model(loaded.model, chosen, statistics)
    _stream(loaded, ids, cache, max_new_tokens, temperature)
    note(f"cache ({chosen.name}): {cache.memory()}")


def _prompt_text(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InvalidInputError("prompt: give either PROMPT ('-' reads standard input) or --prompt-file")
    if prompt == "-":
        prompt_file = "-"
    text = prompt if prompt_file is None else read_text(prompt_file, "prompt-file")
    if not text or not text.strip():
        raise InvalidInputError("prompt: is empty; give some text")
    return text


def _token_ids(loaded: "LoadedModel", text: str, chat: bool | None) -> "torch.Tensor":
    """Token ids [1, tokens] of the prompt, in the chat template unless there is none or ``chat`` is false."""
    tokenizer = loaded.tokenizer
    if chat and tokenizer.chat_template is None:
        raise InvalidInputError(f"chat: {loaded.model_id} has no chat template; use --raw")
    if chat is False or tokenizer.chat_template is None:
        encoded = tokenizer(text, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids: torch.Tensor = encoded["input_ids"]
    if not ids.numel():
        raise InvalidInputError("prompt: has no tokens; give some text")
    return ids


def _stream(
    loaded: "LoadedModel", ids: "torch.Tensor", cache: "Cache", max_new_tokens: int, temperature: float
) -> None:
    """Generate and print the text as it is made."""
    import torch
    from transformers import TextStreamer

    from bitdecoding.integrations.transformers.forward import cache_argument

    # The model's own sampling settings would only draw warnings where nothing is sampled
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    ids = ids.to(loaded.model.device)
    loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{cache_argument(loaded.model): cache},
        max_new_tokens=max_new_tokens,
        pad_token_id=loaded.tokenizer.eos_token_id,
        streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
