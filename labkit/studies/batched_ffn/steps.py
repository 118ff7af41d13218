"""Routed experts through the cache: the steps of a trace, one a call."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from labkit.bench import ledger
from labkit.kernels.gguf.experts import Experts
from labkit.kernels.offload import policies, slots
from labkit.studies.batched_ffn import variants
from labkit.studies.batched_ffn.work import distinct

Call = Callable[[], Any]


class Steps:
    """The steps of a trace, one a call: N tokens through every layer, experts brought as the variant says.

    host: all layers' experts, one layer after the other, pinned if works are on a GPU. routing: experts of every token,
    [steps][layers][N][top_k]. works: of `routed`, one a layer; their ids are not read. policy, capacity: of the cache,
    capacity in experts a layer.

    No copy of a step begins before it, and it ends when all have landed, those for the next step's first layer
    included: so that each is in the time of one step, its own. Copied when needed, no expert sets out before the layer
    before its own has been computed, since until then no router could have chosen it. done: number of the step that
    was computed last.
    """

    def __init__(
        self, host: Experts, routing: Sequence[Sequence[Sequence[Sequence[int]]]], works: Sequence[Any], policy: str,
        capacity: int, variant: str,
    ):  # fmt: skip
        from labkit.kernels.gguf import routed

        self.host, self.routing, self.variant = host, routing, variant
        self.layers, self.done = len(works), -1
        N, top_k, device, E = len(works[0].x), works[0].top_k, works[0].x.device, len(host) // self.layers
        self.needs = [[[(n, e) for e in distinct(ids)] for n, ids in enumerate(step)] for step in routing]
        ids = torch.tensor(routing, dtype=torch.int32, device=device)
        self.ids, self.now = ids.unbind(), ids[0].clone()  # of all steps, and what the layers read: of this one
        self.works = [replace(work, ids=now) for work, now in zip(works, self.now, strict=True)]
        self.tables = [torch.full((E,), -1, dtype=torch.int32, device=device) for _ in range(self.layers)]
        if variant == variants.RESIDENT:
            policy, capacity = "lru", E
        keys = [(layer, e) for layer in range(self.layers) for e in range(E)]
        self.kept = slots.ExpertSlots(host, self._policy(policy, capacity * self.layers), self._room(), device, keys)
        if variant == variants.RESIDENT:
            list(self.kept.waves(keys))  # brought once, and all hit from now on
        choice = routed.matrix_rule_of(N, E, top_k)
        self.before, self.experts, self.after, self.whole = [], [], [], []  # of each layer one call
        if variant == variants.COPIES:
            return
        for table, work in zip(self.tables, self.works, strict=True):
            order, last = routed.sort(work.ids, E, choice.tokens), routed.weighted_sum(work)
            launches = routed.grouped_indexed(self.kept.slots, table, work, choice, matrix=True, order=order)
            self.before.append(captured([order.launch], device))
            self.experts.append(captured(launches, device))
            self.after.append(captured([last], device))
            self.whole.append(captured([order.launch, *launches, last], device))

    def _policy(self, name: str, capacity: int) -> policies.Policy:
        """Every call goes on in the trace, so `belady` foresees many rounds of it.

        In what `pinned` counts the layers take turns: of experts that all are needed equally often it keeps those that
        come first, and so as many of each layer. (Else one layer would miss them all, and no other would have copies
        to hide.)
        """
        first = [[key for turn in zip_longest(*step) for key in turn if key] for step in self.needs]
        trace = [keys for step in self.needs for keys in step]
        return policies.make(
            name, capacity, first, [keys for keys in trace * 100 if not policies.bypasses(keys, capacity)]
        )

    def _room(self) -> int:
        """As many slots as the largest dispatch needs: the next layer's experts may all be on their way."""
        return max(len(keys) for step in self.needs for keys in step)

    def __call__(self) -> None:
        self.done = (self.done + 1) % len(self.needs)
        self.kept.follow()
        if self.variant != variants.COPIES:
            self.now.copy_(self.ids[self.done])
        for layer, needed in enumerate(self.needs[self.done]):
            self._layer(layer, needed)
        self.kept.settle()

    def finish_the_trace(self) -> None:
        """Go on to its end: the next step is its first, and the cache has seen all of it: so for every variant."""
        while self.done + 1 < len(self.needs):
            self()
        if self.now.is_cuda:
            torch.cuda.synchronize(self.now.device)  # the next step may be on another stream

    def _layer(self, layer: int, needed: list[Any]) -> None:
        """One layer; the next one's experts set out while it is computed.

        They are asked for after this layer's table, which would wait for them. If its own experts are all there at
        once, also before their slots are released: the free ones are then those of earlier layers, and no copy waits
        for this layer's kernels.
        """
        if self.variant == variants.NEEDED:
            self.kept.follow()
        waves = self.kept.waves(needed)
        if self.variant == variants.COPIES:
            deque(waves, maxlen=0)
            return
        at_once = False
        for count, wave in enumerate(waves):
            at_once = len(wave) == len(needed)
            if not at_once and not count:
                self.before[layer]()
            if count:
                self.kept.follow()  # the wave before reads the table, too
            self._place(layer, wave)
            (self.whole if at_once else self.experts)[layer]()
            if at_once:
                self._prefetch(layer)
        if not at_once:
            self._prefetch(layer)
            self.after[layer]()

    def _prefetch(self, layer: int) -> None:
        if self.variant == variants.PREFETCHED:
            self.kept.prefetch(self._next(layer))

    def _place(self, layer: int, wave: dict[Any, int]) -> None:
        """The layer's table: where the experts of a wave lie."""
        table = self.tables[layer]
        where = torch.full((len(table),), -1, dtype=torch.int32, pin_memory=table.is_cuda)  # so that the host goes on
        where.numpy()[[expert for _, expert in wave]] = list(wave.values())
        self.kept.send(where, table)

    def _next(self, layer: int) -> list[Any]:
        """The experts of the layer after this one; of the next step's first after the last."""
        step = self.done if layer + 1 < self.layers else (self.done + 1) % len(self.needs)
        return self.needs[step][(layer + 1) % self.layers]


def captured(calls: Sequence[Call], device: torch.device) -> Call:
    """One call of several: on a GPU a graph, which takes the host as long as one launch. They run once here."""

    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, calls)


def _replay(graph: Any, calls: Sequence[Call]) -> None:
    """calls: those of the graph, which does not itself keep their tensors."""
    graph.replay()


ledger.watch(__name__)
