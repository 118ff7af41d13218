"""A decode made ready: memory, tables and the launch of every position, from a model's weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from labkit.kernels.decoder import streamed
from labkit.kernels.decoder.model import Decoder, Weights
from labkit.kernels.decoder.step import LEAST_BLOCK_T, Choice, Memory, Uploaded, allocate, generate_each, step, upload
from labkit.kernels.decoder.streamed import StreamChoice, StreamedMemory
from labkit.kernels.decoder.tables import Lowering, buffer_shapes, groups, lower
from labkit.kernels.decoder.validate import validate
from labkit.kernels.launch import Launch
from labkit.kernels.target import check_hopper, multiprocessors

REGISTERS, SHARED = 65536, 227 << 10  # of a multiprocessor, from compute capability 9.0 on
# Rows of a tile, and the rest: the fastest for Llama-3.2-1B, of one sequence (on an H100), and of four (on an H200)
ALONE = 4, Choice(block_k=1024, ahead=2, block_t=32, registers=128)
BATCHED = 16, Choice(block_k=512, ahead=2, block_t=32)
SPAN = 128  # positions of a record of attention


@dataclass(frozen=True)
class Decode:
    """A model's decode on a GPU. memory.buffers: "token" [batch, 1], "tokens", "logits", the caches "k_cache.0" …"""

    memory: Memory
    tables: Uploaded
    choice: Choice | StreamChoice

    def at(self, position: int) -> Launch:
        """The launch of a token: its successor takes the place of `token`, of every sequence.

        ValueError for a position past the cache.
        """
        if isinstance(self.choice, StreamChoice):
            assert isinstance(self.memory, StreamedMemory)
            return streamed.step(self.memory, self.tables, position, choice=self.choice)
        return step(self.memory, self.tables, position, choice=self.choice)

    def generate(self, prompt: Sequence[int], count: int, start: int = 0) -> list[int]:
        """The `count` tokens after a prompt, greedily. RuntimeError if a program gave up waiting."""
        return self.generate_each([prompt], count, start)[0]

    def generate_each(self, prompts: Sequence[Sequence[int]], count: int, start: int = 0) -> list[list[int]]:
        """`generate` for each of `batch` prompts of one length. ValueError for other prompts."""
        return generate_each(self.memory, self.at, prompts, count, start)


def prepare(
    model: Decoder, weights: Weights, device: str | torch.device = "cuda", cache: int = 2048, rows: int | None = None,
    span: int | None = SPAN, choice: Choice | StreamChoice | None = None, batch: int = 1, group: int | None = None,
) -> Decode:  # fmt: skip
    """A Llama model's decode, one token at a time of each of `batch` sequences, as one launch a token.

    weights: by checkpoint name, of one dtype, bf16, fp16 or fp32 (`load_weights`); cache: positions; rows: of a tile;
    span: positions that one record of attention reads at most, None: all; group: query heads that it takes on, None: as
    many as it can; rows, choice: None: what suits Llama-3.2-1B. Where rows, span, group and choice are left as they are
    and the model's shape allows it, a Hopper GPU runs `streamed.step`; a `StreamChoice` asks for it. All programs must
    be resident at once, so that nothing else may run on the GPU meanwhile. ValueError naming the argument, its value
    and what is allowed. Source: AutoMegaKernel and Stanford MegaKernels, by tables in device memory; page 03.

        decode = prepare(decoder("Llama-3.2-1B"), load_weights(decoder("Llama-3.2-1B"), folder))
        decode.generate(prompt, 64)
    """
    device, dtype = torch.device(device), next(iter(weights.values())).dtype
    if choice is None and (rows, span, group) == (None, SPAN, None) and _streams(model, dtype, device, cache, batch):
        choice = streamed.usual(batch)
    if isinstance(choice, StreamChoice):
        for name, value, left in (("rows", rows, None), ("span", span, SPAN), ("group", group, None)):
            if value != left:
                raise ValueError(f"{name} is {value}; allowed with a StreamChoice: {left}")
        how = _streamed(model, dtype, device, cache, choice, batch)
        return _ready(streamed.together(allocate(how, weights, device)), choice)
    usual_rows, usual = ALONE if batch == 1 else BATCHED
    rows, choice = usual_rows if rows is None else rows, usual if choice is None else choice
    sizes = {"itemsize": dtype.itemsize, "span": span, "batch": batch}
    largest = max(groups(model, dtype.itemsize)) if choice.block_t >= LEAST_BLOCK_T else 1
    sizes["group"] = largest if group is None else group
    how = Lowering(model, 1, cache=cache, position=None, rows=rows, **sizes)
    if device.type == "cuda":
        buffers = {name: torch.empty(1, dtype=dtype, device=device) for name in buffer_shapes(how)}
        how = replace(how, programs=resident(step(Memory(how, buffers), upload(lower(how), device), 0, choice=choice)))
    return _ready(allocate(how, weights, device), choice)


def _streams(model: Decoder, dtype: torch.dtype, device: torch.device, cache: int, batch: int) -> bool:
    """Whether `streamed.step` takes the model on this device."""
    try:
        _streamed(model, dtype, device, cache, streamed.usual(batch), batch)
    except ValueError:
        return False
    return True


def _streamed(
    model: Decoder, dtype: torch.dtype, device: torch.device, cache: int, choice: StreamChoice, batch: int
) -> Lowering:
    """What is lowered for `streamed.step`, one program a multiprocessor. ValueError for what it cannot take."""
    check_hopper(device, "device")
    how = streamed.lowering(model, multiprocessors(device), cache, dtype.itemsize, batch)
    streamed.check_streamed(how, dtype, choice)
    return how


def _ready(memory: Memory, choice: Choice | StreamChoice) -> Decode:
    tables = lower(memory.how, memory.addresses())
    validate(tables, memory.extents(), position=0)
    return Decode(memory, upload(tables, memory.counters.device), choice)


def resident(launch: Launch) -> int:
    """Programs of a launch that are all on the GPU at once, by the registers and the shared memory that each takes."""
    kernel = launch.compile()
    kernel._init_handles()
    threads = 32 * kernel.metadata.num_warps
    each = min(REGISTERS // (threads * -(-kernel.n_regs // 8) * 8), SHARED // (kernel.metadata.shared + 1024), 16)
    return multiprocessors(launch.args["records"].device) * each
