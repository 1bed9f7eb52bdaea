"""The main job in one go: calibrate a model, answer over a 4-bit cache, and measure how close it stays to BF16.

    scripts/demo [MODEL] [--text FILE] [--question TEXT]

MODEL is the alias smollm2-135m-instruct (default), a folder in Transformers' format, a .gguf file or a hub id. All that
was downloaded or computed is kept in the cache folder, so that a second run only generates.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bitdecoding.cli.calibrations import cached_path, choose_calibration
from bitdecoding.errors import BitDecodingError, InvalidInputError
from bitdecoding.evaluation import (
    KLReport,
    Trajectory,
    generate_trajectory,
    load_trajectories,
    run_kl,
    save_trajectories,
)
from bitdecoding.evaluation.runner import RESULT_VERSION
from bitdecoding.integrations.transformers import FP4Cache
from bitdecoding.integrations.transformers.forward import cache_argument
from bitdecoding.models import SMOLLM2, LoadedModel, cache_folder, load_model, model_shape
from bitdecoding.recipe import get_recipe

RECIPES = ("bitdecoding-nvfp4", "bitdecoding-mxfp4", "trtllm-nvfp4", "fp8")
TEXT = Path(__file__).parent.parent / "benchmarks" / "texts" / "article.txt"
QUESTION = "What is this article about? Answer in three sentences."
STEPS = 128
NEW_TOKENS = 80


def prompt_ids(loaded: LoadedModel, text: str, question: str) -> list[int]:
    """The text and a question about it, in the model's chat template if it has one."""
    content = f"{text}\n\n{question}"
    if loaded.tokenizer.chat_template is None:
        ids = loaded.tokenizer(f"{content}\n\nAnswer:").input_ids
    else:
        messages = [{"role": "user", "content": content}]
        ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    context = model_shape(loaded.model.config).max_context
    if len(ids) + STEPS > context:
        raise InvalidInputError(
            f"text: {len(ids)} tokens and {STEPS} steps exceed the model's context of {context}; give a shorter one"
        )
    return list(ids)


def answer(loaded: LoadedModel, ids: list[int], cache: FP4Cache) -> str:
    """The model's greedy answer over the FP4 cache."""
    prompt = torch.tensor([ids], device=loaded.model.device)
    output = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{cache_argument(loaded.model): cache},
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=loaded.tokenizer.eos_token_id,
    )
    return loaded.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()


def reference_trajectory(loaded: LoadedModel, ids: list[int], path: Path) -> Trajectory:
    """The BF16 continuation of the prompt, from an earlier run if it began with the same tokens."""
    if path.exists():
        (kept,) = load_trajectories(path, loaded)
        if kept.token_ids[: kept.prompt_length] == tuple(ids):
            return kept
    trajectory = generate_trajectory(loaded, "demo", ids, STEPS)
    save_trajectories([trajectory], path, loaded)
    return trajectory


def closeness_table(report: KLReport) -> Table:
    """Rows of the report."""
    table = Table(title="Closeness to the BF16 cache, teacher-forced", title_justify="left")
    for heading, justify in (("recipe", "left"), ("mean KL [nats]", "right"), ("top-1 agreement", "right")):
        table.add_column(heading, justify=justify)
    for summary in report.summaries:
        table.add_row(summary.name, f"{summary.mean_kl:.5f}", f"{1 - summary.mean_mismatch:.1%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--text", type=Path, default=TEXT, help="a text of about 2,000 tokens or more")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    console, start = Console(highlight=False), time.monotonic()

    def say(stage: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {stage}", file=sys.stderr, flush=True)

    say(f"loading {args.model}")
    loaded = load_model(args.model, device=args.device)
    ids = prompt_ids(loaded, args.text.read_text(), args.question)
    recipes = [get_recipe(name) for name in RECIPES]
    say("calibration")
    calibration, _ = choose_calibration(loaded, None, recipes, allow_mismatch=False)
    say(f"answering over {len(ids)} prompt tokens")
    cache = FP4Cache.for_model(loaded.model, recipes[0], calibration)
    text = answer(loaded, ids, cache)
    say("reference continuation")
    kept = cache_folder() / "demo" / cached_path(loaded, 0).stem
    trajectory = reference_trajectory(loaded, ids, kept.with_suffix(".trajectories.json"))
    say("closeness of each recipe")
    report = run_kl(
        loaded,
        [trajectory],
        recipes,
        calibration=calibration,
        results_path=kept.with_suffix(f".results-v{RESULT_VERSION}.json"),
    )
    say("done")
    console.print(f"\nModel:    {loaded.model_id}, {len(ids)} prompt tokens, {STEPS} teacher-forced steps")
    console.print(f"Question: {args.question}", markup=False, soft_wrap=True)
    console.print(f"Answer:   {text}", markup=False, soft_wrap=True)
    console.print(f"Cache:    {cache.memory()}\n", markup=False, soft_wrap=True)
    console.print(closeness_table(report))


if __name__ == "__main__":
    try:
        main()
    except (BitDecodingError, OSError) as error:
        sys.exit(f"error: {error}")
