"""Inputs for the gather kernel, from `decode_cases`, and what it must give."""

from dataclasses import dataclass, replace

import torch
from decode_cases import Case, Spec, make_case

from bitdecoding.kernels.buffers import LayerBuffers
from bitdecoding.kernels.gather import gather
from bitdecoding.recipe import PAGE_SIZE

UNTOUCHED = 7.0


@dataclass
class GatherCase:
    case: Case
    starts: list[int]  # first position wanted
    use_means: bool = True
    use_key_mean: bool = True
    rotate: bool = True

    @property
    def counts(self) -> list[int]:
        return [max(0, self.case.before(row) - start) for row, start in enumerate(self.starts)]

    def buffers(self) -> LayerBuffers:
        buffers = self.case.buffers
        if not self.use_means:
            buffers = replace(buffers, means=None)
        return buffers if self.use_key_mean else replace(buffers, key_mean=None)

    def expected(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """16-bit [kv_heads, tokens, head_dim] of positions 0 .. before - 1."""
        case, codec = self.case, self.case.codec
        before = case.before(row)
        keys, values = case.keys[row][:, :before].clone(), case.values[row][:, :before].clone()
        count = before // PAGE_SIZE
        if count:
            stored = codec.decode_keys(case.key_pages[row])
            if case.buffers.means is not None and self.use_means:
                stored = stored + case.key_pages[row]["mean"].float().unsqueeze(-2)
            if self.rotate:
                stored = codec.unrotate(stored)
            if self.use_key_mean:
                stored = stored + codec.key_mean.unsqueeze(-2)
            sink = case.recipe.sink_tokens if int(case.plan.rows[row, 3]) >= 0 else 0
            pages = slice(sink, count * PAGE_SIZE)
            keys[:, pages] = stored.transpose(0, 1).flatten(1, 2).to(keys.dtype)[:, pages]
            decoded = codec.decode_values(case.value_pages[row])
            values[:, pages] = decoded.transpose(0, 1).flatten(1, 2).to(values.dtype)[:, pages]
        return keys, values

    def check(self, *, wide_start: bool = False, spare: int = 3, padded: int = 8) -> None:
        """Run the kernel and compare bit for bit; ``spare`` tokens behind and ``padded`` channels beside the results
        must stay."""
        case, counts = self.case, self.counts
        spec, device = case.spec, case.query.device
        total = sum(counts)
        start = torch.tensor([0, *counts], device=device).cumsum(0)
        start = start if wide_start else start.to(torch.int32)
        shape = (total + spare, spec.kv_heads, spec.head_dim + padded)
        keys, values = (torch.full(shape, UNTOUCHED, dtype=spec.dtype, device=device) for _ in range(2))
        positions = torch.tensor(self.starts, dtype=torch.int32, device=device) if any(self.starts) else None
        gather(
            self.buffers(),
            case.plan.rows,
            case.plan.block_table,
            start,
            keys[..., : spec.head_dim],
            values[..., : spec.head_dim],
            start_position=positions,
            rotate=self.rotate,
        )
        for result in (keys, values):
            assert (result[..., spec.head_dim :] == UNTOUCHED).all()
            assert (result[total:] == UNTOUCHED).all()
        for row, first in enumerate(self.starts):
            part = slice(int(start[row]), int(start[row + 1]))
            for name, actual, wanted in zip(("keys", "values"), (keys, values), self.expected(row), strict=True):
                got = actual[part, :, : spec.head_dim].transpose(0, 1)
                assert torch.equal(got, wanted[:, first:]), (name, row, first)


def gather_case(spec: Spec, starts: list[int] | None = None, device: str = "cuda", **options: bool) -> GatherCase:
    return GatherCase(make_case(spec, device), starts or [0] * len(spec.lengths), **options)
