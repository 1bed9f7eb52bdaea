"""Short prompts from which a model generates its own calibration text.

Each prompt is one sentence, and each asks for a different kind of writing, so
that the continuations cover exposition, narrative, code, history, instructions,
arithmetic, correspondence and comparison.
"""

from __future__ import annotations

CALIBRATION_PROMPTS: tuple[str, ...] = (
    "Explain in plain language why the sky looks blue at noon but turns red and orange near sunset.",
    "The lighthouse keeper had not spoken to anyone in forty days when a small green boat "
    "drifted silently into the cove.",
    "Write a Python function that merges overlapping intervals in a list of pairs, with a "
    "docstring and two short usage examples.",
    "Describe how the invention of the printing press changed trade, religion and education "
    "in Europe over the following century.",
    "Give a recipe for a hearty lentil and tomato soup that serves four people, listing the "
    "ingredients before the numbered steps.",
    "A train leaves at 9:15 with 84 passengers, 27 get off and 16 board at each of two stops, so how many remain?",
    "Write a kind letter to a friend who is nervous about leaving a secure job to open a small neighborhood bookshop.",
    "Compare bicycles and electric scooters for daily travel in a crowded city, considering "
    "cost, safety, speed, weather and storage.",
)
