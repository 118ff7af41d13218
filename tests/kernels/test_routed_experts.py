"""Routed experts: router, sort, variants against float64, and the same bits whatever else is in the batch or cached."""

import functools

import pytest
import torch

from labkit.kernels.gguf import experts, formats, reference, routed
from labkit.kernels.gguf.choose import Choice, TileChoice, narrow_rule
from labkit.kernels.offload import policies, slots

E, TOP_K, HIDDEN, WIDTH = 4, 2, 64, 32  # small: the interpreter is slow
TILE = TileChoice(4, 16, 4)  # another one of the same bits


@functools.cache
def some(format="Q8_0", count=E, hidden=HIDDEN, width=WIDTH):
    """Experts on the CPU, and gate, up and down of each in fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    blocks = [
        formats.quantise(torch.randn((count, *shape), generator=generator) * shape[1] ** -0.5, format)
        for shape in shapes
    ]
    exact = [formats.dequantise(one, format) for one in blocks]
    return experts.pack(*blocks, format), list(zip(*exact, strict=True))


def on(device, **of):
    found = some(**of)[0]
    empty = found.like(len(found), device)
    empty.store.copy_(found.store)
    return empty


def tokens(N, device, hidden=HIDDEN, dtype=torch.float32):
    return torch.randn((N, hidden), generator=torch.Generator().manual_seed(5)).to(device, dtype)


def routing(N, device, count=E, top_k=TOP_K):
    generator = torch.Generator().manual_seed(N)
    ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(N)]).int()
    return ids.to(device), torch.rand((N, top_k), generator=generator).softmax(1).to(device)


def work(device, N=3, hidden=HIDDEN, width=WIDTH, dtype=torch.float32, **of):
    """Buffers poisoned."""
    found = routed.Work.of(tokens(N, device, hidden, dtype), *routing(N, device, **of), width)
    for one in (found.mid, found.partials, found.y):
        one.fill_(float("nan"))
    return found


def table(device, slots):
    return torch.tensor(slots, dtype=torch.int32, device=device)


def everything(device, count=E):
    return table(device, range(count))


def run(*parts):
    for part in parts:
        for one in part if isinstance(part, list) else [part]:
            one()


def result(variant, held, made, **options):
    """y of a variant with all experts there."""
    if variant is routed.grouped_indexed:
        launches = variant(held, everything(held.store.device), made, **options)
    else:
        launches = variant(held, {e: e for e in range(len(held))}, made.ids.tolist(), made)
    run(launches, routed.weighted_sum(made))
    return made.y.clone()


@functools.cache
def one_by_one(device):
    """y of the work of three tokens, whose other variants have the same bits."""
    return result(routed.per_token, on(device), work(device))


def part(made, chosen):
    """The work of some tokens alone."""
    found = routed.Work.of(made.x[chosen].contiguous(), made.ids[chosen].contiguous(), made.weights[chosen], WIDTH)
    for one in (found.mid, found.partials, found.y):
        one.fill_(float("nan"))
    return found


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def error(y, expected):
    return float((y.cpu().double() - expected).norm() / expected.norm())


def expected(made, format="Q8_0", **of):
    exact = some(format, **of)[1]
    return reference.routed(exact, made.x.cpu(), made.ids.cpu(), made.weights.cpu())


# router


def test_the_router_takes_the_largest_logits_and_their_softmax(device):
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn((E + 1, HIDDEN), generator=generator)
    W = formats.pack(formats.quantise(exact, "F32"), "F32").to(device)
    x = tokens(4, device)
    logits, weights = torch.empty((4, E + 1), device=device), torch.empty((4, TOP_K), device=device)
    ids = torch.full((4, TOP_K), -1, dtype=torch.int32, device=device)
    run(routed.router(W, x, logits, ids, weights, shared_gate=True))
    wanted = reference.product(exact, x.cpu())
    assert error(logits, wanted) < 1e-6
    top = wanted[:, :E].topk(TOP_K)
    assert ids.cpu().tolist() == top.indices.tolist()
    torch.testing.assert_close(weights.cpu().double(), top.values.softmax(1), rtol=1e-5, atol=0)
    for n in range(4):  # the same bits alone
        one = [tensor[:1].clone() for tensor in (logits, ids, weights)]
        run(routed.router(W, x[n : n + 1], *one, shared_gate=True))
        assert same(one[0], logits[n : n + 1])
        assert same(one[2], weights[n : n + 1])


def test_of_equal_logits_the_first_experts_are_taken(device):
    W = formats.pack(formats.quantise(torch.ones(5, 32), "F32"), "F32").to(device)
    ids = torch.empty((1, 2), dtype=torch.int32, device=device)
    weights = torch.empty((1, 2), device=device)
    run(routed.router(W, torch.ones(1, 32, device=device), torch.empty((1, 5), device=device), ids, weights))
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]


# sort


@pytest.mark.parametrize(("N", "tile"), [(1, 1), (7, 2), (7, 8), (400, 4)])
def test_slots_are_sorted_by_expert_and_cut_in_tiles(N, tile, device):
    ids, _ = routing(N, device)
    if N == 7:
        ids[ids == 2] = 4  # an expert without slots
    if N == 400:
        ids[5, 1] = -1  # no expert: its slot gets no tile
    made = routed.sort(ids, E, tile)
    made.order.fill_(-7)
    made.launch()
    flat = ids.flatten().tolist()
    by_expert = [[slot for slot, expert in enumerate(flat) if expert == e] for e in range(E)]
    wanted = [slot for members in by_expert for slot in members]
    assert made.order.tolist()[: len(wanted)] == wanted
    tiles, start = [], 0
    for e, members in enumerate(by_expert):
        tiles += [[e, start + i, min(tile, len(members) - i)] for i in range(0, len(members), tile)]
        start += len(members)
    found = made.tiles.tolist()
    assert found[: len(tiles)] == tiles
    assert {one[0] for one in found[len(tiles) :]} <= {-1}
    assert len(found) == routed.most_tiles(N * TOP_K, E, tile) >= len(tiles)


# variants


def test_experts_are_those_of_the_reference(device):
    """Those that the other variants are compared with, bit for bit."""
    assert error(one_by_one(device), expected(work(device))) < 1e-6


WAYS = {
    "multiply-add": {"choice": Choice(blocks=4)},
    "matrix": {"matrix": True, "choice": TILE},
    "matrix, ahead": {"matrix": True, "choice": TileChoice(8, 8, 2, ahead=2)},
}


@pytest.mark.parametrize(
    ("format", "ways"), [("Q5_K", ["multiply-add"]), ("Q6_K", ["matrix, ahead"]), ("F32", list(WAYS))]
)
def test_every_format(format, ways, device):
    """Those with the most arrays and the least; the second expert alone, so that strides count."""
    hidden, width = (64, 32) if format == "F32" else (256, 256)  # the least: the interpreter takes seconds for these
    of = {"count": 2, "hidden": hidden, "width": width}
    made = work(device, N=1, hidden=hidden, width=width, count=2, top_k=1)
    made.ids.fill_(1)
    held = on(device, format=format, **of)
    for options in (WAYS[way] for way in (WAYS if device == "cuda" else ways)):
        run(routed.grouped_indexed(held, everything(device, 2), made, **options), routed.weighted_sum(made))
        limit = 1e-6 if format == "F32" or "matrix" in options else 1e-5  # multiply-add takes 128 away from K formats
        assert error(made.y, expected(made, format, **of)) < limit
        made.y.fill_(float("nan"))


def test_matrix_instructions_in_16_bits(device):
    made = work(device, dtype=torch.float16)
    assert error(result(routed.grouped_indexed, on(device), made, matrix=True), expected(made)) < 2e-3


def test_a_token_has_the_same_bits_in_every_variant_and_batch(device):
    held, made, whole = on(device), work(device), one_by_one(device)
    assert not whole.isnan().any()
    assert same(result(routed.grouped_rowcopy, held, made), whole)
    for options in ({}, {"choice": Choice(blocks=2, tokens=1)}):
        assert same(result(routed.grouped_indexed, held, made, **options), whole)
    for chosen in ([0, 1], [2, 0]):  # two chunks, permuted
        assert same(result(routed.grouped_indexed, held, part(made, chosen)), whole[chosen])


def test_the_matrix_family_has_the_same_bits_in_every_batch(device):
    held, made = on(device), work(device, N=9)
    made.ids.copy_(torch.tensor([[1, (0, 2, 3)[n % 3]] for n in range(9)]))  # of one expert, more slots than a tile has
    whole = result(routed.grouped_indexed, held, made, matrix=True, choice=TileChoice(2, 8, 1, ahead=0))
    tiles = [TileChoice(2, 8, 1, ahead=5), TileChoice(4, 16, 1, ahead=2), TileChoice(8, 32, 1, ahead=3)]
    for chosen, choice in (([3], None), *zip(([8], [2, 5], [3, 0]), tiles, strict=True)):
        alone = result(routed.grouped_indexed, held, part(made, chosen), matrix=True, choice=choice)
        assert same(alone, whole[chosen])
    assert not same(result(routed.grouped_indexed, held, part(made, [3])), whole[3:4])


def test_shuffled_experts_and_any_order_of_bringing_them_have_the_same_bits(device):
    held, made = on(device), work(device)
    whole = result(routed.grouped_indexed, held, made)
    moved = torch.randperm(E, generator=torch.Generator().manual_seed(2))
    shuffled = held.like(E, device)
    shuffled.store[moved.to(device)] = held.store  # expert e lies in slot moved[e]
    run(routed.grouped_indexed(shuffled, table(device, moved.tolist()), made), routed.weighted_sum(made))
    assert same(made.y, whole)
    made.partials.fill_(float("nan"))
    for present in ({3, 1}, {0, 2}):
        run(routed.grouped_indexed(held, table(device, [e if e in present else -1 for e in range(E)]), made))
    run(routed.weighted_sum(made))
    assert same(made.y, whole)


def test_a_sum_by_atomics_or_by_a_library_fails_the_test_of_bits(device):
    """The negative control: products that torch.matmul makes, added in the order of the experts."""
    made, whole = work(device), one_by_one(device)
    exact = [[one.to(device) for one in of] for of in some()[1]]
    y = torch.zeros_like(made.y)
    for e, (gate, up, down) in enumerate(exact):
        token, k = (made.ids == e).nonzero(as_tuple=True)
        middle = torch.nn.functional.silu(made.x[token] @ gate.T) * (made.x[token] @ up.T)
        y.index_add_(0, token, made.weights[token, k, None] * (middle @ down.T))
    assert error(y, whole.cpu().double()) < 1e-5
    assert not same(y, whole)


def test_an_expert_that_is_not_there_leaves_its_slots_alone(device):
    made = work(device)
    run(routed.grouped_indexed(on(device), table(device, [-1, *range(1, E)]), made))
    absent = (made.ids == 0).flatten()
    assert absent.any()
    assert made.partials[absent].isnan().all()
    assert not made.partials[~absent].isnan().any()


def test_one_sort_serves_several_tables(device):
    held, made = on(device), work(device)
    whole = result(routed.grouped_indexed, held, made)
    choice = routed.rule_of(3, E, TOP_K)
    order = routed.sort(made.ids, E, choice.tokens)
    made.partials.fill_(float("nan"))
    launches = routed.grouped_indexed(held, everything(device), made, choice, order=order)
    assert len(launches) == 2
    run(order.launch, launches, routed.weighted_sum(made))
    assert same(made.y, whole)


def test_the_shared_expert_comes_last(device):
    made = work(device)
    run(routed.grouped_indexed(on(device), everything(device), made))
    shared = tokens(3, device) * 100
    logits = torch.linspace(-2, 2, 6, device=device).view(3, 2)
    run(routed.weighted_sum(made, shared, logits[:, 1]))
    partials = made.partials.view(3, TOP_K, HIDDEN)
    wanted = (made.weights[..., None].double() * partials.double()).sum(1)
    wanted += torch.sigmoid(logits[:, 1:].double()) * shared.double()
    assert error(made.y, wanted.cpu()) < 1e-6
    exact = made.y.clone()
    for n in range(3):
        one = routed.Work(
            made.ids[n : n + 1], made.weights[n : n + 1], made.x[n : n + 1], made.mid[:TOP_K],
            made.partials[n * TOP_K : (n + 1) * TOP_K], torch.empty((1, HIDDEN), device=device),
        )  # fmt: skip
        run(routed.weighted_sum(one, shared[n : n + 1], logits[n : n + 1, 1]))
        assert same(one.y, exact[n : n + 1])


# with the cache


@pytest.mark.parametrize(("policy", "capacity"), [("lru", 1), ("slru", 2), ("lru", E)])
def test_results_have_the_same_bits_whatever_the_cache_holds(capacity, policy, device):
    held, made, whole = some()[0], work(device), one_by_one(device)
    if device == "cuda":  # from where copies can be made beside kernels
        held, pageable = held.like(E, "cpu", pinned=True), held
        held.store.copy_(pageable.store)
    for token_by_token in (False, True) if capacity == 2 else (False,):
        kept = slots.ExpertSlots(held, policies.make(policy, capacity), room=1, device=device)
        made.partials.fill_(float("nan"))
        dispatches = made.ids.tolist() if token_by_token else [sorted(set(made.ids.flatten().tolist()))]
        order = routed.sort(made.ids, E, 2)
        order.launch()
        for n, dispatch in enumerate(dispatches):
            for resident in kept.waves(dispatch):
                if token_by_token:
                    ids = [one if i == n else [] for i, one in enumerate(made.ids.tolist())]
                    run(routed.per_token(kept.slots, resident, ids, made))
                else:
                    where = table(device, [resident.get(e, -1) for e in range(E)])
                    run(routed.grouped_indexed(kept.slots, where, made, Choice(blocks=1, tokens=2), order=order))
        run(routed.weighted_sum(made))
        assert same(made.y, whole)


# errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, w: routed.sort(w.ids.long(), E, 2), "ids is torch.int64; allowed: torch.int32"),
        (
            lambda h, w: routed.grouped_indexed(h, everything("cpu").long(), w),
            "slots is torch.int64; allowed: torch.int32",
        ),
        (
            lambda h, w: routed.grouped_indexed(h, everything("cpu"), work("cpu", hidden=96)),
            r"x is \(3, 96\); allowed: \(3, 64\)",
        ),
        (
            lambda h, w: routed.grouped_indexed(h, everything("cpu"), work("cpu", width=16)),
            r"mid is \(6, 16\); allowed: \(6, 32\)",
        ),
        (lambda h, w: routed.grouped_indexed(h, everything("cpu"), w, Choice(tokens=3)), "tokens is 3; allowed: 1, 2"),
        (
            lambda h, w: routed.grouped_indexed(h, everything("cpu"), w, TileChoice(2, 4), matrix=True),
            "tokens is 4; allowed: 8, 16",
        ),
        (
            lambda h, w: routed.grouped_indexed(h, everything("cpu"), w, Choice(), matrix=True),
            "choice is Choice.*; allowed: a TileChoice",
        ),
        (lambda h, w: routed.weighted_sum(w, w.x), "only one of shared and gate is given; allowed: both or neither"),
        (lambda h, w: routed.weighted_sum(w, w.x, w.x[:, :1]), r"gate is \(3, 1\); allowed: \(3,\)"),
        (
            lambda h, w: routed.router(h.matrix("down", 0), w.x, w.x, w.ids[:, :0], w.weights),
            "top_k is 0; allowed: 1 to 64, the experts",
        ),
        (lambda h, w: h.matrix("gates", 0), "role is 'gates'; allowed: gate, up, down"),
        (
            lambda h, w: routed.check_tiles(70000),
            "the slots may need 70000 tiles; allowed: at most 65535, along a grid",
        ),
    ],
)
def test_what_cannot_be_taken_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(some()[0], work("cpu"))


def test_the_shared_rule_has_one_family_of_bits():
    for tokens_, count, top_k in ((1, 256, 8), (64, 256, 8), (512, 256, 8), (5, E, TOP_K)):
        found = routed.rule_of(tokens_, count, top_k)
        assert (found.groups, found.num_warps) == (Choice().groups, Choice().num_warps)
        assert found == narrow_rule(found.tokens, gated=True)
    assert [routed.rule_of(n, 256, 8).tokens for n in (1, 32, 64, 128, 512)] == [1, 1, 2, 4, 8]
    assert [routed.matrix_rule_of(n, 256, 8).tokens for n in (1, 128, 129, 512, 513)] == [8, 8, 16, 16, 32]
    assert {routed.matrix_rule_of(n, 256, 8).num_warps for n in (1, 64, 512)} == {1}
