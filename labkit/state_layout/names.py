"""Names of the variants of the study's production operations, and the functions of `trials` that make them."""

from typing import Any

OURS, OURS_KV, OURS_TRANSPOSED = "ours VK", "ours KV", "ours VK, transposed"
OURS_IN_ORDER = "ours VK, slots in order"  # the others find their states in slots at random
TOKENS = "decode, token by token"
TILES = (16, 32, 64)  # of the chunk-state kernel alone


def fla_in_place(layout: str, tile: int) -> str:
    """fla-core's kernel, launched on the states in place."""
    return f"fla {layout} in place, BV={tile}"


def fla(layout: str) -> str:
    """fla-core's public call."""
    return f"fla {layout}"


ATTENTION_GYM = "attn-gym VK"
ATTENTION_GYM_IN_ORDER = "attn-gym VK, slots in order"


def chunk_state(form: str, tile: int) -> str:
    """The chunk-state kernel of extend; form: KV, VK or "VK, transposed"."""
    return f"{form}, BV={tile}"


def rivals(op: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Where the states are -> our variant and the libraries' that find them there, so that equals are compared.

    Only attn-gym takes indices into a pool, which may be in order; fla-core takes the states one after the other.
    """
    public = (fla("KV"), fla("VK"))
    if op != "step":
        return {"": (OURS, public)}
    raw = tuple(fla_in_place(layout, tile) for layout in ("KV", "VK") for tile in (8, 32))
    return {"in order": (OURS_IN_ORDER, (*raw, *public, ATTENTION_GYM_IN_ORDER)), "at random": (OURS, (ATTENTION_GYM,))}


def of(x: Any) -> dict[str, str]:
    """Name -> role of the variants of a case (of another operation than `decode`), the first one repeated as A/A."""
    if x.op == "step":
        raw = [fla_in_place(layout, tile) for layout in ("KV", "VK") for tile in (8, 32)] if x["gate"] == "GDN" else []
        peers = dict.fromkeys([*raw, fla("KV"), fla("VK"), ATTENTION_GYM, ATTENTION_GYM_IN_ORDER], "peer")
        return {OURS: "ours", OURS_IN_ORDER: "step", OURS_KV: "step"} | peers
    if x.op == "verify":
        slow = {TOKENS: "baseline"} if x["draft"] == "chain" else {}
        return {OURS: "ours", OURS_KV: "step"} | slow
    if x.op == "extend":
        return {OURS: "ours", OURS_KV: "step", OURS_TRANSPOSED: "step", fla("KV"): "peer", fla("VK"): "peer"}
    if x.op == "chunk_state":
        plain = [chunk_state(layout, tile) for layout in ("VK", "KV") for tile in TILES]
        return dict.fromkeys([*plain, chunk_state("VK, transposed", 64)], "step")
    return {OURS: "ours", OURS_KV: "step"}  # drift


def _makers() -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
    """(operation, variant) -> the name of its function in `trials`, and the arguments that make it this variant."""
    layouts = {"KV": False, "VK": True}
    found: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for op, function in (("step", "step"), ("verify", "verify"), ("drift", "drift"), ("extend", "extend")):
        found |= {(op, name): (function, {"v_first": name == OURS}) for name in (OURS, OURS_KV)}
    found["step", OURS_IN_ORDER] = ("step", {"v_first": True, "in_order": True})
    found["step", ATTENTION_GYM] = ("attention_gym_step", {})
    found["step", ATTENTION_GYM_IN_ORDER] = ("attention_gym_step", {"in_order": True})
    found["verify", TOKENS] = ("token_by_token", {"v_first": True})
    found["extend", OURS_TRANSPOSED] = ("extend", {"v_first": True, "transposed": True})
    for layout, v_first in layouts.items():
        found["step", fla(layout)] = ("fla_public_step", {"v_first": v_first})
        found["extend", fla(layout)] = ("fla_extend", {"v_first": v_first})
        for tile in (8, 32):
            found["step", fla_in_place(layout, tile)] = ("fla_step", {"v_first": v_first, "tile": tile})
        for tile in TILES:
            options = {"v_first": v_first, "transposed": False, "tile": tile}
            found["chunk_state", chunk_state(layout, tile)] = ("chunk_state", options)
    options = {"v_first": True, "transposed": True, "tile": 64}
    found["chunk_state", chunk_state("VK, transposed", 64)] = ("chunk_state", options)
    return found


MAKERS = _makers()
