"""Choices by name: enums whose unknown values give the library's own error."""

from enum import Enum

from bitdecoding.errors import InvalidInputError

__all__ = ["Choice"]


class Choice(str, Enum):
    """A string enum; looking up an unknown value raises `InvalidInputError` with the known ones."""

    @classmethod
    def _missing_(cls, value: object) -> "Choice":
        known = ", ".join(member.value for member in cls)
        raise InvalidInputError(f"{cls.__name__}: {value!r} is unknown; use one of {known}")
