"""The control kernel's rules in plain Python, and random histories of an engine that uses them.

`ControlModel` says what `control_step` must do. `Engine` plays an engine with a paged cache: admissions with prefix
hits, chunked prefill, decode steps with drafted tokens, rows left out, preemption, resumption, finished rows, blocks
given out again. It keeps the contents of slots and pages as identities of tokens and checks that every row finds its
own.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bitdecoding.kernels.buffers import TAIL_TOKENS
from bitdecoding.kernels.control import Counters, SlotTables, StepPlan, control_step
from bitdecoding.kernels.schedule import items_of_row, units_of_row
from bitdecoding.recipe import MAX_DECODE_TOKENS, PAGE_SIZE

GARBAGE = 2147480000


@dataclass
class RowState:
    length: int = 0
    before: int = 0
    tail_slot: int = -1
    sink_slot: int = -1
    promote_sink: int = -1

    def numbers(self) -> list[int]:
        return [self.length, self.before, self.tail_slot, self.sink_slot, self.promote_sink, 0, 0, 0]

    @property
    def page(self) -> int:
        return self.before // PAGE_SIZE

    @property
    def last_page(self) -> int:
        return (self.length - 1) // PAGE_SIZE


@dataclass
class Slot:
    key: int = -1
    older: int = -1
    stamp: int = 0


class Pool:
    """Slots of one kind, and where blocks expect them."""

    def __init__(self, slots: int) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.entries: dict[int, int] = {}
        self.claims = self.evictions = 0

    def find(self, block: int, older_too: bool = False) -> int:
        slot = self.entries.get(block, -1)
        if slot < 0:
            return -1
        keys = {self.slots[slot].key} | ({self.slots[slot].older} if older_too else set())
        return slot if block in keys else -1

    def claim(self, wanting: int, used: set[int]) -> list[int]:
        """Free slots for that many rows: unkeyed ones, then the least recently used; -1 when there are no more."""

        def age(index: int) -> tuple[int, int]:
            slot = self.slots[index]
            return (slot.stamp if self.keyed(index) else 0), index

        free = sorted((i for i in range(len(self.slots)) if i not in used), key=age)[:wanting]
        self.claims += len(free)
        self.evictions += sum(self.keyed(i) for i in free)
        return free + [-1] * (wanting - len(free))

    def keyed(self, index: int) -> bool:
        key = self.slots[index].key
        return key >= 0 and self.entries.get(key) == index


class ControlModel:
    def __init__(self, num_blocks: int, tail_slots: int, sink_slots: int) -> None:
        self.num_blocks = num_blocks
        self.tails, self.sinks = Pool(tail_slots), Pool(sink_slots)
        self.steps = self.lost = self.misses = self.refusals = self.promoted = self.invalid = 0

    def step(
        self,
        lengths: Sequence[int],
        tokens: Sequence[int],
        table: Sequence[Sequence[int]],
        sink_tokens: int,
        null_block: int | None = None,
    ) -> list[RowState]:
        self.steps += 1
        states = [self._state(*row, null_block) for row in zip(lengths, tokens, table, strict=True)]
        live = [row for row, state in enumerate(states) if state.length]
        self._tails(states, live, table)
        if sink_tokens and self.sinks.slots:
            self._sinks(states, live, table)
        for row in live:
            self.promoted += max(0, states[row].length // PAGE_SIZE - states[row].page)
        return states

    def _state(self, length: int, tokens: int, table: Sequence[int], null_block: int | None) -> RowState:
        if length <= 0:
            return RowState()
        state = RowState(length, max(0, length - max(0, tokens)))
        if state.last_page >= len(table):
            self.invalid += 1
            return RowState()
        ends = {table[0], table[state.last_page]}
        if not all(0 <= block < self.num_blocks for block in ends):
            self.invalid += 1
            return RowState()
        return RowState() if null_block in ends else state

    def _tails(self, states: list[RowState], live: list[int], table: Sequence[Sequence[int]]) -> None:
        pool = self.tails
        used: dict[int, int] = {}
        own = {
            row: pool.find(table[row][states[row].page], True)
            for row in live
            if states[row].page <= states[row].last_page
        }
        partial = [row for row in live if states[row].before % PAGE_SIZE]
        full = [row for row in live if not states[row].before % PAGE_SIZE]
        previous = {row: pool.find(table[row][states[row].page - 1]) for row in full if states[row].page}
        # Rows in need of tokens, then those whose block has a slot, then those that have just filled a page
        for rows, found in ((partial, own), (full, own), (full, previous)):
            for row in rows:
                slot = found.get(row, -1)
                if states[row].tail_slot < 0 and slot >= 0 and slot not in used:
                    used[slot] = row
                    states[row].tail_slot = slot
        self.lost += sum(states[row].tail_slot < 0 for row in partial)
        without = [row for row in live if states[row].tail_slot < 0]
        for row, slot in zip(without, pool.claim(len(without), set(used)), strict=True):
            states[row].tail_slot = slot
        moved = []
        for row in live:
            state, slot = states[row], pool.slots[states[row].tail_slot]
            slot.stamp = self.steps
            slot.key, slot.older = table[row][state.last_page], -1
            kept = row not in without and state.tail_slot == own.get(row, -1)
            if kept and state.page == state.last_page:
                continue
            moved.append(row)
            if kept and row in partial and state.last_page == state.page + 1:
                slot.older = table[row][state.page]
        for row in reversed(moved):  # of rows with the same block the lowest has it
            state = states[row]
            block = table[row][state.last_page]
            for other in moved:
                if other > row and table[other][states[other].last_page] == block:
                    pool.slots[states[other].tail_slot].key = -1
            pool.entries[block] = state.tail_slot

    def _sinks(self, states: list[RowState], live: list[int], table: Sequence[Sequence[int]]) -> None:
        pool = self.sinks
        used: set[int] = set()
        filled: dict[int, int] = {}  # block: row
        for row in live:
            state, block = states[row], table[row][0]
            if state.before >= PAGE_SIZE:
                state.sink_slot = pool.find(block)
                self.misses += state.sink_slot < 0
                used.add(state.sink_slot)
            elif state.length >= PAGE_SIZE and block not in filled:
                filled[block] = row
                state.promote_sink = pool.find(block)
                used.add(state.promote_sink)
        without = [row for row in filled.values() if states[row].promote_sink < 0]
        for row, slot in zip(without, pool.claim(len(without), used), strict=True):
            states[row].promote_sink = slot
            self.refusals += slot < 0
            if slot >= 0:
                pool.entries[table[row][0]] = slot
                pool.slots[slot].key = table[row][0]
            else:
                pool.entries.pop(table[row][0], None)
        for row in live:
            for slot in (states[row].sink_slot, states[row].promote_sink):
                if slot >= 0:
                    pool.slots[slot].stamp = self.steps

    def counters(self) -> Counters:
        return Counters(
            self.steps,
            self.tails.claims,
            self.tails.evictions,
            self.lost,
            self.sinks.claims,
            self.sinks.evictions,
            self.misses,
            self.refusals,
            self.promoted,
            self.invalid,
        )


@dataclass
class Batch:
    """Inputs of one step."""

    lengths: list[int]
    tokens: list[int]
    table: list[list[int]]  # with garbage behind the used entries
    null_block: int | None = None
    decode: bool = True


# --- The kernel beside the model


class KernelControl:
    """`control_step` with the model beside it; every step's results and the tables must agree."""

    def __init__(
        self,
        num_blocks: int,
        tail_slots: int,
        sink_slots: int,
        max_rows: int,
        *,
        sink_tokens: int = 16,
        windows: Sequence[int | None] = (None, 200),
        granules: Sequence[int] = (1, 3),
        device: str = "cpu",
        step: Callable[..., None] = control_step,
    ) -> None:
        self.model = ControlModel(num_blocks, tail_slots, sink_slots)
        self.tables = SlotTables(num_blocks, tail_slots, sink_slots, device)
        self.plan = StepPlan(self.tables, max_rows, windows=windows, granules=granules, sink_tokens=sink_tokens)
        self.sink_tokens = sink_tokens
        self.device = device
        self.calls = 0
        self._step = step

    def step(self, batch: Batch) -> list[RowState]:
        expected = self.model.step(batch.lengths, batch.tokens, batch.table, self.sink_tokens, batch.null_block)
        self.calls += 1
        dtype = torch.int64 if self.calls % 2 else torch.int32
        rows = len(batch.lengths)
        self.plan.states.fill_(-77)
        self.plan.item_prefix.fill_(-77)
        table = torch.tensor(batch.table, dtype=dtype, device=self.device).reshape(
            rows, len(batch.table[0]) if rows else 1
        )
        lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=self.device)
        arguments = {}
        if len(set(batch.tokens)) == 1 and batch.tokens[0] >= 0 and self.calls % 3:
            arguments["query_tokens"] = batch.tokens[0]
        else:
            start = torch.tensor([0, *batch.tokens], dtype=torch.int32).cumsum(0)
            arguments["query_start"] = start.to(torch.int32).to(self.device)
        self._step(self.plan, lengths, table, null_block=batch.null_block, **arguments)
        self.compare(expected)
        return expected

    def compare(self, expected: list[RowState]) -> None:
        rows = len(expected)
        assert self.plan.rows(rows).tolist() == [state.numbers() for state in expected]
        assert (self.plan.states[rows:] == -77).all()
        for window, granule in zip(self.plan.windows, self.plan.granules, strict=True):
            units = [units_of_row(s.length, s.before, s.sink_slot >= 0, window, self.sink_tokens) for s in expected]
            items = [items_of_row(row, granule) for row in units]
            prefix = [sum(items[:row]) for row in range(rows + 1)]
            assert self.plan.items(rows, window).tolist() == prefix
        assert (self.plan.item_prefix[:, rows + 1 :] == -77).all()
        tables, model = self.tables, self.model
        assert tables.read_counters() == model.counters()
        assert tables.tail_keys.tolist() == [slot.key for slot in model.tails.slots]
        assert tables.tail_older_keys.tolist() == [slot.older for slot in model.tails.slots]
        assert tables.tail_stamps.tolist() == [slot.stamp for slot in model.tails.slots]
        assert tables.sink_keys.tolist() == [slot.key for slot in model.sinks.slots]
        assert tables.sink_stamps.tolist() == [slot.stamp for slot in model.sinks.slots]
        for entries, actual in (
            (model.tails.entries, tables.tail_of_block),
            (model.sinks.entries, tables.sink_of_block),
        ):
            assert {block: slot for block, slot in enumerate(actual.tolist()) if slot != -1} == entries


# --- An engine


@dataclass
class Request:
    tokens: list[int]  # identities: equal prefixes are equal lists
    target: int
    done: int = 0  # tokens in the cache
    blocks: list[int] = field(default_factory=list)


@dataclass
class EngineOptions:
    num_blocks: int = 40
    rows: int = 6  # live at a time
    tail_slots: int = 6
    sink_slots: int = 3
    sink_tokens: int = 16
    max_length: int = 700
    skip: float = 0.0  # of live rows a step
    null_block: int | None = 0


class Engine:
    """Plays random steps; `control` is asked before each."""

    def __init__(self, options: EngineOptions, seed: int) -> None:
        self.options = options
        self.random = random.Random(seed)
        first = 0 if options.null_block is None else 1
        self.free = list(range(first, options.num_blocks))
        self.references: dict[int, int] = {}
        self.cached: dict[tuple[int, ...], int] = {}  # full prefix: block, also of finished requests
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self.names = 0
        self.pages: dict[int, list[int]] = {}  # promoted contents
        self.rings = [[None] * TAIL_TOKENS for _ in range(options.tail_slots)]
        self.sink_contents: list[list[int] | None] = [None] * options.sink_slots

    # Blocks

    def allocate(self) -> int | None:
        if not self.free:
            return None
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.references[block] = 1
        prefix = self.prefix_of.pop(block, None)
        if prefix is not None:
            del self.cached[prefix]
        return block

    def release(self, request: Request) -> None:
        for block in request.blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)  # stays cached until it is given out again
        request.blocks, request.done = [], 0

    def adopt_prefix(self, request: Request) -> None:
        while (request.done + PAGE_SIZE) < len(request.tokens):
            block = self.cached.get(tuple(request.tokens[: request.done + PAGE_SIZE]))
            if block is None:
                return
            if block in self.free:
                self.free.remove(block)
                self.references[block] = 0
            self.references[block] += 1
            request.blocks.append(block)
            request.done += PAGE_SIZE

    def reserve(self, request: Request, length: int) -> bool:
        while len(request.blocks) * PAGE_SIZE < length:
            block = self.allocate()
            if block is None:
                return False
            request.blocks.append(block)
        return True

    # Steps

    def fresh(self) -> int:
        self.names += 1
        return self.names

    def new_request(self) -> Request:
        r = self.random
        # Prompts share their beginnings; the same identities in the same order
        family = r.randrange(3)
        prompt = [-(1000 * (family + 1) + i) for i in range(r.choice((0, 1, 100, 128, 130, 256, 300)))]
        prompt += [self.fresh() for _ in range(r.choice((1, 1, 5, 20, 127, 128, 200)))]
        target = min(self.options.max_length, len(prompt) + r.choice((1, 5, 140, 300)))
        return Request(prompt[: self.options.max_length], target)

    def admit(self) -> None:
        r = self.random
        if not self.waiting and r.random() < 0.4:
            self.waiting += [self.new_request() for _ in range(1 + self.options.rows // 10)]
        while self.waiting and len(self.live) < self.options.rows:
            request = self.waiting.pop(0)
            self.adopt_prefix(request)
            self.live.insert(r.randrange(len(self.live) + 1), request)
            if r.random() < 0.5:
                break

    def batch(self) -> tuple[Batch, list[tuple[Request, int] | None]]:
        """A step's inputs, and for each row its request and number of new tokens (None: padding)."""
        r, options = self.random, self.options
        self.admit()
        decode = r.random() < 0.7
        chosen: list[tuple[Request, int] | None] = []
        drafts = r.choice((1, 1, 1, 2, 4, 8))
        for request in list(self.live):
            if r.random() < options.skip:
                continue
            known = len(request.tokens) - request.done
            if known <= 1 or decode:
                count = drafts if known <= 1 else min(known, r.randint(1, MAX_DECODE_TOKENS))
            else:
                count = r.choice((known, min(known, r.randint(1, 300))))
            if not self.reserve(request, request.done + count):
                # Preempted: everything is computed again later
                self.live.remove(request)
                self.release(request)
                self.waiting.insert(0, request)
                continue
            chosen.append((request, count))
        for _ in range(r.choice((0, 0, 1, 2))):
            if len(chosen) < options.rows:
                chosen.insert(r.randrange(len(chosen) + 1), None)
        width = 2 + max((len(row[0].blocks) for row in chosen if row), default=0)
        lengths, tokens, table = [], [], []
        for row in chosen:
            garbage = [r.choice((GARBAGE, -5, r.randrange(options.num_blocks))) for _ in range(width)]
            if row is None:
                dummy = options.null_block is not None and r.random() < 0.5
                lengths.append(r.randint(1, PAGE_SIZE * width) if dummy else 0)
                tokens.append(1)
                table.append([options.null_block] * width if dummy else garbage)
                continue
            request, count = row
            length = request.done + count
            used = -(-length // PAGE_SIZE)
            lengths.append(length)
            tokens.append(count)
            table.append(request.blocks[:used] + garbage[used:])
        return Batch(lengths, tokens, table, options.null_block, decode), chosen

    def play(self, control: Callable[[Batch], list[RowState]]) -> None:
        batch, chosen = self.batch()
        states = control(batch)
        slots = [state.tail_slot for state in states if state.length]
        assert len(set(slots)) == len(slots)
        known = {}
        for row, state in zip(chosen, states, strict=True):
            if row is None:
                assert state == RowState()
                continue
            request, count = row
            known[id(request)] = len(request.tokens)
            while len(request.tokens) < request.done + count:
                request.tokens.append(self.fresh())
            assert (state.length, state.before) == (request.done + count, request.done)
            self.check_reads(request, state)
        for row, state in zip(chosen, states, strict=True):
            if row is not None:
                self.write(row[0], state)
        for row in chosen:
            if row is not None:
                self.finish(*row, known[id(row[0])])

    def check_reads(self, request: Request, state: RowState) -> None:
        for page in range(state.page):
            expected = request.tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
            assert self.pages[request.blocks[page]] == expected
        ring = self.rings[state.tail_slot]
        for position in range(state.page * PAGE_SIZE, state.before):
            assert ring[position % TAIL_TOKENS] == request.tokens[position]
        if state.sink_slot >= 0:
            assert state.page and self.sink_contents[state.sink_slot] == request.tokens[: self.options.sink_tokens]
        if state.promote_sink >= 0:
            assert state.page == 0 and state.length >= PAGE_SIZE

    def write(self, request: Request, state: RowState) -> None:
        ring = self.rings[state.tail_slot]
        new = range(state.before, state.length)
        if len(new) <= MAX_DECODE_TOKENS:
            for position in new:
                ring[position % TAIL_TOKENS] = request.tokens[position]
        for page in range(state.page, state.length // PAGE_SIZE):
            content = [
                request.tokens[p] if p >= state.before and len(new) > MAX_DECODE_TOKENS else ring[p % TAIL_TOKENS]
                for p in range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            ]
            self.pages[request.blocks[page]] = content
            if page == 0 and state.promote_sink >= 0:
                self.sink_contents[state.promote_sink] = content[: self.options.sink_tokens]
        if len(new) > MAX_DECODE_TOKENS:
            for position in new:
                if position >= state.length // PAGE_SIZE * PAGE_SIZE:
                    ring[position % TAIL_TOKENS] = request.tokens[position]

    def finish(self, request: Request, count: int, known: int) -> None:
        """Accept some of the drafted tokens, those behind ``known``, and sample the next one."""
        r = self.random
        drafts = max(0, request.done + count - known)
        accepted = count - (r.randint(0, drafts) if r.random() < 0.7 else 0)
        request.done += accepted
        if drafts:
            del request.tokens[request.done :]
        if len(request.tokens) == request.done:
            request.tokens.append(self.fresh())
        for page in range(request.done // PAGE_SIZE):
            prefix = tuple(request.tokens[: (page + 1) * PAGE_SIZE])
            block = request.blocks[page]
            if prefix not in self.cached and block not in self.prefix_of:
                self.cached[prefix] = block
                self.prefix_of[block] = prefix
        if request.done >= request.target:
            self.live.remove(request)
            self.release(request)
        elif r.random() < 0.01:  # preempted for a reason of the engine's own
            self.live.remove(request)
            self.release(request)
            self.waiting.append(request)
