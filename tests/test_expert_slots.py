"""Experts in slots: what a policy decides is what is brought, and nothing is read before it is there."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels.gguf import experts, formats
from labkit.kernels.gguf.experts import Experts
from labkit.kernels.gguf.formats import FORMATS
from labkit.kernels.offload import policies, slots

COUNT = 8
KEYS = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=6, unique=True), max_size=20)


def numbered(count=COUNT):
    """Experts whose bytes are their number; only copied, never multiplied."""
    return Experts(FORMATS["Q8_0"], 32, 8, torch.arange(count, dtype=torch.uint8)[:, None].repeat(1, 16))


class Late:
    """Copies that happen as late as a second stream may make them, and judges what is asked of them.

    A copy is done when it is waited for, all before it too. It must not go to a slot that is being read.
    """

    def __init__(self, host, held):
        self.host, self.held, self.waiting, self.read = host, held, [], set()
        held.fill_(255)

    def copy(self, pairs):
        for expert, slot in pairs:
            assert slot not in self.read, f"slot {slot} is written while it is read"
            self.held[slot].fill_(255)  # half written
            self.waiting.append((expert, slot))

    def wait(self, wanted):
        wanted = set(wanted)
        self.land(1 + max((i for i, (_, slot) in enumerate(self.waiting) if slot in wanted), default=-1))
        self.read |= wanted

    def release(self, read):
        self.read -= set(read)

    def send(self, values, to):
        self.land(len(self.waiting))
        to.copy_(values)

    def follow(self):
        pass

    def settle(self):
        self.land(len(self.waiting))

    def land(self, count):
        for expert, slot in self.waiting[:count]:
            self.held[slot].copy_(self.host[expert])
        self.waiting = self.waiting[count:]


class NeverWaits(Late):
    def wait(self, wanted):
        pass


class NeverSettles(Late):
    def settle(self):
        pass


def cached(policy="lru", capacity=3, room=1, copies=Late, first=(), trace=()):
    made = policies.make(policy, capacity, first, trace)
    return slots.ExpertSlots(numbered(), made, room, "cpu", copies=copies)


def use(kept, dispatch):
    """Waves of a dispatch, each read and found right."""
    found = []
    for wave in kept.waves(dispatch):
        assert len(set(wave.values())) == len(wave)
        for key, slot in wave.items():
            assert (kept.slots.store[slot] == key).all(), f"slot {slot} does not hold {key}"
        found.append(list(wave))
    return found


# where experts lie


@pytest.mark.parametrize("format", FORMATS)
def test_a_matrix_of_an_expert_is_as_it_is_packed_alone(format):
    generator = torch.Generator().manual_seed(0)
    width, hidden = (256, 512) if format in formats.K_FORMATS else (32, 64)  # of whole blocks
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    raw = {
        name: formats.quantise(torch.randn((2, *shape), generator=generator), format) for name, shape in shapes.items()
    }
    found = experts.pack(*raw.values(), format)
    assert (len(found), found.hidden, found.width) == (2, hidden, width)
    for name, blocks in raw.items():
        for e in range(2):
            alone, view = formats.pack(blocks[e], format), found.matrix(name, e)
            assert (view.rows, view.columns) == shapes[name]
            for array in alone.arrays:
                a, b = alone.arrays[array], view.arrays[array]
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                assert b.data_ptr() - found.matrix(name, 0).arrays[array].data_ptr() == e * found.expert_bytes
                assert found.stride(b) * b.element_size() == found.expert_bytes
                assert (b.storage_offset() * b.element_size()) % experts.ALIGNMENT == 0
    least = sum(formats.pack(blocks[0], format).nbytes for blocks in raw.values())
    assert least <= found.expert_bytes < least + 12 * experts.ALIGNMENT


def test_room_for_more_experts():
    raw = [formats.quantise(torch.randn(2, 32, 32), "Q8_0") for _ in range(3)]
    found = experts.pack(*raw, "Q8_0")
    other = found.like(5, "cpu")
    assert (len(other), other.expert_bytes, other.format) == (5, found.expert_bytes, found.format)
    other.store[3].copy_(found.store[1])
    assert torch.equal(other.matrix("up", 3).words, found.matrix("up", 1).words)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 32, 34), (2, 32, 34), (32, 34)), r"down is \(32, 34\); allowed: \[count, rows, bytes of a row\]"),
        (((2, 32, 34), (2, 16, 34), (2, 32, 34)), "up has 32 rows of 32 weights; allowed: 2 × 32 rows of 32"),
        (((2, 32, 34), (2, 32, 68), (2, 32, 34)), "up has 64 rows of 64 weights; allowed: 2 × 32 rows of 32"),
        (((2, 64, 34), (2, 64, 34), (2, 32, 34)), "down has 64 rows of 32 weights; allowed: 2 × 32 rows of 64"),
    ],
)
def test_experts_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        experts.pack(*(torch.zeros(shape, dtype=torch.uint8) for shape in shapes), "Q8_0")


# through the cache


def test_waves_by_hand():
    kept = cached("lru", 2)
    assert use(kept, [0, 1]) == [[0, 1]]
    assert kept.copied == 2
    assert use(kept, [1]) == [[1]]
    assert kept.copied == 2  # it is there
    assert use(kept, [2, 3]) == [[2, 3]]  # a third slot for 2; 0 gives way, whose slot is for 3
    assert use(kept, [2, 3]) == [[2, 3]]
    assert (kept.copied, kept.hits, kept.accesses) == (4, 3, 7)


def test_a_dispatch_that_evicts_its_own_is_given_in_waves():
    trace = [[0, 1, 2], [3, 4, 5]]
    kept = cached("slru", 4)
    assert [use(kept, dispatch) for dispatch in trace] == [[[0, 1, 2]], [[3, 4, 5]]]
    kept = cached("slru", 3)  # of 3, two are protected: the second miss evicts the first, the third the second
    for key in (0, 1, 2, 0, 1):
        use(kept, [key])
    assert use(kept, [3, 4, 5]) == [[3, 4], [5]]  # no slot is left for 5 while 3 and 4 are read


def test_a_dispatch_larger_than_the_cache_passes_through_the_room():
    kept = cached("lru", 2, room=2)
    use(kept, [0, 1])
    assert use(kept, [5, 0, 6, 7, 1]) == [[5, 0, 6], [7, 1]]
    assert kept.copied == 2 + 3  # 0 and 1 are read where they are
    assert use(kept, [0, 1]) == [[0, 1]]
    assert (kept.copied, kept.replayed) == (5, policies.Replay(9, 2, 5))


def test_prefetched_experts_are_copied_once_and_before():
    kept = cached("lru", 4, room=2)
    use(kept, [4, 5, 6, 7])
    kept.prefetch([0, 1, 2])  # two have room
    assert kept.copied == 4 + 2
    assert len(kept._copies.waiting) == 2
    kept.prefetch([1, 0, 7])
    assert kept.copied == 4 + 2
    assert use(kept, [1, 0, 2]) == [[1, 0, 2]]
    assert (kept.copied, kept.hits) == (7, 0)  # the policy never learned of it
    kept.prefetch([0])
    assert kept.copied == 7


def test_a_wrong_guess_gives_way():
    kept = cached("lru", 1, room=1)
    kept.prefetch([4])
    kept.prefetch([5])
    assert kept.copied == 2 == len(kept.slots)
    assert use(kept, [0]) == [[0]]
    assert use(kept, [5]) == [[5]]


def settled(kept, guess):
    """Prefetched experts, found right though no wave has asked for them."""
    kept.prefetch(guess)
    kept.settle()
    for key, slot in kept._early.items():
        assert (kept.slots.store[slot] == key).all(), f"slot {slot} does not hold {key}"
    return list(kept._early)


def test_what_is_asked_for_has_landed_once_settled():
    kept = cached("lru", 2, room=3)
    use(kept, [0, 1])
    assert settled(kept, [4, 1, 5]) == [4, 5]
    assert kept._copies.waiting == []
    assert use(kept, [5, 4]) == [[5, 4]]
    assert kept.copied == 4


def test_settling_waits_once_for_every_copy_under_way(monkeypatch):
    stream, waited = object.__new__(slots.Stream), []  # without a GPU
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    stream.device, stream._landed = 0, {3: "first", 4: "first", 5: "second"}
    stream.settle()
    stream.settle()
    assert sorted(waited) == ["first", "second"]
    assert stream._landed == {}


def test_copies_that_follow_begin_after_what_is_computed(monkeypatch):
    stream, waited = object.__new__(slots.Stream), []  # without a GPU
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current stream of {device}")
    stream.device, stream.stream = 0, SimpleNamespace(wait_stream=waited.append)
    stream.follow()
    assert waited == ["current stream of 0"]


def test_what_is_sent_goes_in_line_with_experts_and_is_waited_for(monkeypatch):
    order, inside = [], []  # without a GPU
    current = SimpleNamespace(wait_event=lambda event: order.append(f"wait for {event}"))
    beside = SimpleNamespace(record_event=lambda: order.append("recorded") or "its event")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(inside.append(stream)))
    stream = object.__new__(slots.Stream)
    stream.device, stream.stream = 0, beside
    table = SimpleNamespace(copy_=lambda values, non_blocking: order.append(f"copy {values} {non_blocking}"))
    stream.send("values", table)
    assert inside == [beside]
    assert order == ["copy values True", "recorded", "wait for its event"]


def test_a_small_tensor_is_sent_after_the_experts():
    kept, table = cached("lru", 2, room=2), torch.zeros(3)
    kept.prefetch([4, 5])
    kept.send(torch.arange(3.0), table)
    assert table.tolist() == [0, 1, 2]
    assert kept._copies.waiting == []


@pytest.mark.parametrize("policy", ["pinned", "belady"])
def test_what_a_policy_holds_from_the_start_is_brought_first(policy):
    kept = cached(policy, 3, first=[[6, 7], [6, 7]], trace=[[7], [6]])
    assert kept.copied == 2
    assert use(kept, [7]) == [[7]]
    assert use(kept, [6]) == [[6]]
    assert (kept.hits, kept.copied) == (2, 2)


@pytest.mark.parametrize("policy", policies.POLICIES)
@settings(max_examples=30, deadline=None)
@given(capacity=st.integers(1, 5), room=st.integers(1, 4), trace=KEYS, first=KEYS, seed=st.integers(0, 99))
def test_every_expert_is_there_when_it_is_read_and_hits_are_those_of_the_policy(
    policy, capacity, room, trace, first, seed
):
    through = [dispatch for dispatch in trace if not policies.bypasses(dispatch, capacity)]
    kept = cached(policy, capacity, room, first=first, trace=through)
    guess = random.Random(seed)
    for i, dispatch in enumerate(trace):
        seen = [key for wave in use(kept, dispatch) for key in wave]
        assert seen == dispatch
        following = trace[i + 1] if i + 1 < len(trace) else []
        if guess.random() < 0.7:
            kept.prefetch(following if guess.random() < 0.5 else guess.sample(range(COUNT), 3))
    assert kept.replayed == policies.replay(policy, capacity, trace, first)


def test_a_thousand_random_dispatches():
    chance = random.Random(1)
    kept = cached("slru_freq", 3, 2)
    for _ in range(1000):
        use(kept, chance.sample(range(COUNT), chance.randint(1, 7)))
        kept.prefetch(chance.sample(range(COUNT), 2))
    assert kept.bypassed > 1000
    assert kept.hits > 100


def test_the_test_has_power():
    """A copy that is not waited for, in a wave or at the end, and a slot that is given up too early, are seen."""
    with pytest.raises(AssertionError, match="does not hold"):
        use(cached(copies=NeverWaits), [0, 1])
    kept = cached("lru", 1, room=1)
    waves = kept.waves([0])
    next(waves)
    kept._free.extend(kept._held.values())  # while it is read
    with pytest.raises(AssertionError, match="written while it is read"):
        kept.prefetch([1, 2])
    with pytest.raises(AssertionError, match="does not hold"):
        settled(cached(copies=NeverSettles), [4])


def test_a_wave_that_is_left_early_is_released():
    kept = cached("lru", 2, room=1)
    for _ in kept.waves([0, 1]):
        break
    assert kept._copies.read == set()
    assert use(kept, [2, 3]) == [[2, 3]]


def test_on_a_cpu_a_copy_is_there_at_once():
    kept = slots.ExpertSlots(numbered(), policies.LRU(2), device="cpu")
    assert isinstance(kept._copies, slots.Now)
    assert use(kept, [3, 5, 7]) == [[3, 5, 7]]
    assert use(kept, [3, 5]) == [[3, 5]]


@pytest.mark.gpu
def test_no_slot_is_read_before_its_copy_has_landed():
    """On the GPU: large experts, random evictions, reads that are slow."""
    count, size = 12, 1 << 22
    host = Experts(FORMATS["Q8_0"], 32, 8, torch.empty((count, size), dtype=torch.uint8, pin_memory=True))
    host.store.copy_(torch.arange(count, dtype=torch.uint8)[:, None].expand(-1, size))
    kept = slots.ExpertSlots(host, policies.LRU(3), room=3)
    assert isinstance(kept._copies, slots.Stream)
    chance, wrong = random.Random(2), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        dispatch = chance.sample(range(count), chance.randint(1, 6))
        for wave in kept.waves(dispatch):
            torch.cuda._sleep(chance.randint(0, 200_000))
            for key, slot in wave.items():
                wrong += (kept.slots.store[slot] != key).sum()
        kept.prefetch(chance.sample(range(count), 3))
        if chance.random() < 0.3:
            kept.settle()
            for key, slot in kept._early.items():
                wrong += (kept.slots.store[slot] != key).sum()
            kept._copies.release(kept._early.values())
    assert int(wrong) == 0


# errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cached(capacity=0), "capacity is 0; allowed: at least 1 expert"),
        (lambda: cached(room=0), "room is 0; allowed: at least 1 slot"),
        (
            lambda: slots.ExpertSlots(numbered(), policies.LRU(1), device="cpu", keys=[1, 1, 2]),
            "keys are 3, 2 different; allowed: one for each of 8",
        ),
        (
            lambda: slots.ExpertSlots(numbered(), policies.LRU(1), device="cuda"),
            "host is on cpu, not pinned; allowed: on cpu, pinned for a GPU",
        ),
        (lambda: use(cached(), [1, 9]), "key is 9; allowed: those of the 8 experts"),
        (lambda: cached().prefetch(["x"]), "key is 'x'; allowed: those of the 8 experts"),
    ],
)
def test_what_cannot_be_taken_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_keys_of_layers():
    keys = [(layer, expert) for layer in range(2) for expert in range(4)]
    kept = slots.ExpertSlots(numbered(), policies.LRU(3), device="cpu", keys=keys)
    ((wave),) = kept.waves([(1, 2), (0, 1)])
    assert [int(kept.slots.store[slot][0]) for slot in wave.values()] == [6, 1]
