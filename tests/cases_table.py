"""The hand-made numeric cases of tests/cases as tables, shared by the CPU tests and the GPU tests."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

CASES_FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class QuantizeCase:
    """One block, its scale rule, and the scale and codes it must get."""

    name: str
    fmt: str
    rule: str
    block: torch.Tensor
    scale: float
    scale_byte: int
    codes: list[int]


@dataclass(frozen=True)
class ProbabilityCase:
    """One block of base-2 scores less their running maximum (-inf where masked); scale and codes of c·p."""

    name: str
    fmt: str
    rule: str
    c: float
    scores: torch.Tensor
    scale: float
    codes: list[int]


@dataclass(frozen=True)
class LdlqCase:
    """Key rows, the query second moment A they are rounded against, and the rows expected back."""

    name: str
    fmt: str
    rule: str
    damping: float
    second_moment: torch.Tensor
    rows: torch.Tensor
    dequantized: torch.Tensor
    error: torch.Tensor
    plain_error: torch.Tensor


def load(file_name: str) -> dict[str, Any]:
    return json.loads((CASES_FOLDER / file_name).read_text())


def _quantize_cases() -> list[QuantizeCase]:
    return [
        QuantizeCase(
            f"{case['format']}: {case['name']}",
            case["format"],
            case["scale_rule"],
            torch.tensor(case["block"]),
            case["scale"],
            case["scale_byte"],
            case["codes"],
        )
        for case in load("quantize.json")["cases"]
    ]


def _probability_cases() -> list[ProbabilityCase]:
    cases = []
    for case in load("probability.json")["cases"]:
        scores = torch.full((len(case["codes"]),), -torch.inf)
        scores[: case["masked_after"]] = torch.tensor(case["base2_logits_minus_max"])
        cases.append(
            ProbabilityCase(case["name"], case["format"], case["rule"], case["c"], scores, case["scale"], case["codes"])
        )
    return cases


def _ldlq_cases() -> list[LdlqCase]:
    table = load("ldlq.json")
    second_moment, rows = torch.tensor(table["A"]), torch.tensor(table["rows"])
    return [
        LdlqCase(
            f"{case['format']}: {case['scale_rule']}",
            case["format"],
            case["scale_rule"],
            case["damping"],
            second_moment,
            rows,
            torch.tensor(case["dequantized"]),
            torch.tensor(case["error_against_A"], dtype=torch.float64),
            torch.tensor(case["plain_rounding_error_against_A"], dtype=torch.float64),
        )
        for case in table["cases"]
    ]


QUANTIZE_CASES = _quantize_cases()
PROBABILITY_CASES = _probability_cases()
LDLQ_CASES = _ldlq_cases()


def by_name(cases: list[Any]) -> Any:
    """``@by_name(QUANTIZE_CASES)`` runs a test that takes ``case`` once for every case."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
