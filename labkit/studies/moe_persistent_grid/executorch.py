"""ExecuTorch's expert layer, as it was released and with the pull request's persistent grid applied to it.

| function   | what it calls                                                                                       |
|------------|-----------------------------------------------------------------------------------------------------|
| per_pair   | `fused_moe`: the decode kernels, a program for each (token, expert) pair and block of columns        |
| batched    | `fused_moe_batched`: sorted tokens, tiles of 64 rows, bf16 or 8-bit activations                      |
| narrow     | `fused_moe_batched` with tiles of 16 rows instead, which a comment in it compares with 64           |
| product    | one of its two products, with the arguments that the layer gives it                                 |

The release (1.5.1) has one program a tile. The pull request (19219, closed unmerged) changed launch and loop of its
four batched kernels: `min(multiprocessors, tiles)` programs take tiles in turn, by columns within groups of
GROUP_SIZE_M blocks of rows, tuned over 8 and 16. `persistent` makes the same change to the syntax tree of what was
released; hypothesis: fewer programs save launches and reuse weights in L2. All tune themselves, over their own
configurations; for tiles of 16 rows these are those that were written for 64.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from labkit import sources
from labkit.kernels.experts.blocks import blocks
from labkit.kernels.experts.int4 import GROUP
from labkit.studies.moe_persistent_grid.variants import RELEASE

if TYPE_CHECKING:
    from labkit.kernels.experts.inputs import LayerInputs

MODULE = "executorch.backends.cuda.triton.kernels.fused_moe"
GROUPS_M = (8, 16)  # of the pull request
BLOCK_M = 64  # rows of a block of its batched kernels
NARROW_BLOCK_M = 16
PRODUCTS = {  # product, whether activations have 8 bits -> its kernel
    ("gemm1", False): "_fused_moe_batched_kernel",
    ("gemm2", False): "_fused_moe_silu_batched_kernel",
    ("gemm1", True): "_fused_moe_batched_int8_kernel",
    ("gemm2", True): "_fused_moe_silu_batched_int8_kernel",
}
OPERATORS = "triton::"  # in which the release registers its functions, once a process


def per_pair(x: "LayerInputs") -> Callable[[], torch.Tensor]:
    """The decode layer; a call returns its output [T, H], bf16. x: INT4 weights, bf16 activations."""
    return _bound(sources.load(RELEASE, MODULE).fused_moe, x)


def batched(x: "LayerInputs", int8: bool = False, grid: str = "tiles") -> Callable[[], torch.Tensor]:
    """The prefill layer; a call returns its output [T, H], bf16. grid: "tiles" or "persistent"."""
    return _bound(module(grid).fused_moe_batched, x, activation_dtype="int8" if int8 else "bf16")


def narrow(x: "LayerInputs", int8: bool = False) -> Callable[[], torch.Tensor]:
    """The prefill layer in blocks of 16 rows, one program a tile; a call returns its output [T, H], bf16."""
    changed = sources.changed(RELEASE, MODULE, blocks_of_16)
    return _bound(changed.fused_moe_batched, x, activation_dtype="int8" if int8 else "bf16")


@dataclass(frozen=True)
class Product:
    """A product of the batched layer, as that launches it. May be changed in what a launch decides (`launcher`).

    kernel: that tunes itself; args: by name; config: what it has chosen; blocks: of rows, in its grid; live: those that
    have a token.
    """

    kernel: Any
    args: Mapping[str, Any]
    config: Mapping[str, Any]
    blocks: int
    live: int


def tuner(gemm: str, int8: bool, grid: str) -> Any:
    """The kernel of a product, "gemm1" or "gemm2"."""
    return getattr(module(grid), PRODUCTS[gemm, int8])


def product(x: "LayerInputs", gemm: str, int8: bool, grid: str) -> Product:
    """One product of the layer, which runs once here; the kernel chooses its configuration if it has none yet."""
    kernel, seen = tuner(gemm, int8, grid), []
    run = kernel.run

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(dict(zip(kernel.arg_names, args, strict=False)) | options)
        return run(*args, **options)

    with mock.patch.object(kernel, "run", noted):
        batched(x, int8, grid)()
    [args] = [{name: one[name] for name in kernel.arg_names if name in one} for one in seen]
    counts = x.ids.flatten().bincount(minlength=x.shape[1]).tolist()
    return Product(kernel, args, kernel.best_config.all_kwargs(), len(args["expert_ids"]), blocks(counts, BLOCK_M))


def programs(found: Product, grid: str, live: bool = False, per_sm: int = 1, sms: int = 1) -> tuple[int, int]:
    """Tiles of a launch, and its programs. live: of blocks that have a token alone, as if the host knew them."""
    columns = -(-found.args["N"] // found.config["BLOCK_SIZE_N"])
    tiles = (found.live if live else found.blocks) * columns
    return tiles, tiles if grid == "tiles" else min(sms * per_sm, tiles)


def launcher(
    found: Product, grid: str, live: bool = False, per_sm: int = 1, sms: int = 1, group_m: int = 0
) -> Callable[[], Any]:
    """A call of the product alone, with what it has chosen. per_sm: programs a multiprocessor, of a persistent grid.

    group_m: another GROUP_SIZE_M; 0: the chosen one.
    """
    _, count = programs(found, grid, live, per_sm, sms)
    args = dict(found.args) | dict(found.config)
    if grid == "persistent":
        args["num_expert_blocks"] = found.live if live else found.blocks
        args["GROUP_SIZE_M"] = group_m or args["GROUP_SIZE_M"]
    return lambda: found.kernel.fn.run(grid=(count,), warmup=False, **args)


def module(grid: str) -> ModuleType:
    """The release, or its copy with the pull request's change. ValueError for another grid."""
    if grid not in ("tiles", "persistent"):
        raise ValueError(f"grid is {grid!r}; allowed: tiles, persistent")
    return sources.load(RELEASE, MODULE) if grid == "tiles" else sources.changed(RELEASE, MODULE, persistent)


def _bound(function: Callable[..., torch.Tensor], x: "LayerInputs", **options: Any) -> Callable[[], torch.Tensor]:
    (_, E, top_k, _, _), packed = x.shape, [w.packed.view(torch.int8) for w in (x.w1, x.w2)]
    weights = (packed[0], x.w1.scales, packed[1], x.w2.scales, x.weights.float(), x.ids.long())
    return lambda: function(x.x, *weights, top_k, E, GROUP, **options)


def persistent(tree: ast.Module) -> ast.Module:
    """The pull request's change. ValueError if the release is not written as it is expected to be."""
    change = _Persistent()
    changed = change.visit(tree)
    if change.kernels != 4 or change.launches != 4:
        raise ValueError(f"{change.kernels} kernels and {change.launches} launches were changed; expected: 4 of each")
    return changed


# A kernel's body below its first lines runs once a tile; these replace the lines that find the tile.
_LOOP = """
tiles = num_expert_blocks * num_n_blocks
for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
    group_tiles = GROUP_SIZE_M * num_n_blocks
    first_block = tile // group_tiles * GROUP_SIZE_M
    group_blocks = min(num_expert_blocks - first_block, GROUP_SIZE_M)
    expert_block_idx = first_block + tile % group_tiles % group_blocks
    n_block = tile % group_tiles // group_blocks
"""
_GRID = "(min({programs}, num_expert_blocks * triton.cdiv({columns}, meta['BLOCK_SIZE_N'])),)"
_PROGRAMS = "torch.cuda.get_device_properties(hidden_states.device).multi_processor_count"
_CONFIGS = "[_in_groups(one, size) for one in {configs} for size in {groups}]"
_IN_GROUPS = """
def _in_groups(one, size):
    kwargs = one.kwargs | {"GROUP_SIZE_M": size}
    return triton.Config(kwargs, num_warps=one.num_warps, num_stages=one.num_stages)
"""


class _Persistent(ast.NodeTransformer):
    """Changes kernels that find their tile by `expert_block_idx`, and the grids and calls that launch them."""

    def __init__(self) -> None:
        self.kernels = self.launches = 0

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        after = next(i for i, one in enumerate(node.body) if isinstance(one, ast.FunctionDef))
        node.body.insert(after, ast.parse(_IN_GROUPS).body[0])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if any("register_fake" in ast.unparse(one) for one in node.decorator_list):
            node.decorator_list = []
            return node
        # Operators are registered once a process: the copy's functions are called without that.
        node.decorator_list = [one for one in node.decorator_list if OPERATORS not in ast.unparse(one)]
        found = [i for i, one in enumerate(node.body) if _assigns(one) == "expert_block_idx"]
        if found and any("triton.jit" in ast.unparse(one) for one in node.decorator_list):
            return self._kernel(node, found[0])
        return self.generic_visit(node)

    def _kernel(self, node: ast.FunctionDef, at: int) -> ast.FunctionDef:
        names = [_assigns(one) for one in node.body[at - 2 : at + 2]]
        if names != ["pid", "num_n_blocks", "expert_block_idx", "n_block"]:
            raise ValueError(f"{node.name} begins with {names}; expected: pid, num_n_blocks, expert_block_idx, n_block")
        total, loop = ast.parse(_LOOP).body
        loop.body += node.body[at + 2 :]
        node.body = [*node.body[: at - 2], node.body[at - 1], total, loop]
        node.args.args += [
            ast.arg("num_expert_blocks"),
            ast.arg("GROUP_SIZE_M", ast.parse("tl.constexpr").body[0].value),
        ]
        tuned = next(one for one in node.decorator_list if "autotune" in ast.unparse(one))
        configs = next(one for one in tuned.keywords if one.arg == "configs")
        configs.value = _expression(_CONFIGS.format(configs=ast.unparse(configs.value), groups=GROUPS_M))
        self.kernels += 1
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        text = ast.unparse(node.value) if node.value else ""
        if text.startswith("(num_expert_blocks * triton.cdiv("):
            columns = text.partition("cdiv(")[2].partition(",")[0]
            node.value = _expression(_GRID.format(programs=_PROGRAMS, columns=columns))
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        kernel = ast.unparse(node.func)
        if kernel.startswith("wrap_triton("):  # of a registered operator; the copy's are not
            node.func = _expression(kernel.replace("wrap_triton(", "(", 1))
        if kernel.startswith("wrap_triton(") and "batched" in kernel:
            node.keywords.append(ast.keyword("num_expert_blocks", _expression("num_expert_blocks")))
            self.launches += 1
        return node


def blocks_of_16(tree: ast.Module) -> ast.Module:
    """Batched kernels in blocks of 16 rows. ValueError if the release is not written as it is expected to be."""
    change = _Narrow()
    changed = change.visit(tree)
    if (change.sizes, change.layers) != (1, 2):
        raise ValueError(
            f"{change.sizes} numbers of rows were changed, which {change.layers} layers use; expected: 1 and 2"
        )
    return changed


class _Narrow(ast.NodeTransformer):
    """Changes the one number that the rows of a block come from; its functions are called without being registered."""

    def __init__(self) -> None:
        self.sizes = self.layers = 0

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if _assigns(node) == "_BATCHED_BLOCK_M" and ast.unparse(node.value) == str(BLOCK_M):
            node.value = ast.Constant(NARROW_BLOCK_M)
            self.sizes += 1
        self.layers += ast.unparse(node.value) == "_BATCHED_BLOCK_M"
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        registers = ("register_fake", OPERATORS)
        node.decorator_list = [
            one for one in node.decorator_list if not any(word in ast.unparse(one) for word in registers)
        ]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        kernel = ast.unparse(node.func)
        if kernel.startswith("wrap_triton("):
            node.func = _expression(kernel.replace("wrap_triton(", "(", 1))
        return node


def _assigns(node: ast.stmt) -> str:
    """The name that a statement assigns, if it is one."""
    return node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else ""


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
