"""What is found of compilers' errors: in code worked out by hand, in kernels that have them, and in others."""

import dataclasses

import compiler_errors
import pytest
import torch
from kernels_for_tests import copy, matmul, spill, squared_matmul

from labkit.kernels import offline
from labkit.kernels.gated_delta import chunked

# registers that nothing has written


def listing(*lines):
    """The instructions of one function, at 0x0, 0x10, 0x20 …, with the bits of each as cuobjdump prints them."""
    return "\n".join(
        f"        /*{16 * i:04x}*/   {line} ;   /* 0x0{i}5a */\n   /* 0x5 */" for i, line in enumerate(lines)
    )


# What ptxas 12.8 made of a product with 16 columns; UR21 stands nowhere else.
WRONG = """
        /*30a0*/                   ULDC.64 UR4, c[0x0][0x210] ;                     /* 0x0000840000047ab9 */
        /*30b0*/                   UIADD3 UR4, UP0, UR21, 0x20, URZ ;               /* 0x0000002015047890 */
                                                                                    /* 0x000fe2000ff1e03f */
        /*30c0*/                   UIADD3.X UR5, UR21, -0x3ffffff0, URZ, UP0, !UPT ;
        /*30d0*/                   HGMMA.64x16x16.F32 R56, R32, gdesc[UR4].tnspB, R56 ;
        /*30e0*/                   EXIT ;
        /*30f0*/                   BRA 0x30f0;
"""


def test_a_register_that_nothing_writes_is_found():
    assert compiler_errors.unwritten(WRONG) == {"UR21": "UIADD3 UR4, UP0, UR21, 0x20, URZ"}
    assert compiler_errors.unwritten(WRONG.replace("UR21", "UR4")) == {}
    assert compiler_errors.unwritten("") == {}


@pytest.mark.parametrize(
    "line",
    [
        "UIADD3 UR4, UPT, UPT, -UR9, 0x40, URZ",
        "UIADD3 UR9, UP0, UR9, 0x40, URZ",
        "UMOV UR4, UR9",
        "UISETP.GE.AND UP0, UPT, UR9, 0x2, UPT",
        "ISETP.NE.U32.AND P1, PT, R27, UR9, PT",
        "IADD3 R2, P0, P1, R2, UR9, R5",
        "R2UR UR4, UR9",
        "@!P0 LDG.E.128 R2, desc[UR9][R4.64+0x10]",
        "STG.E desc[UR9][R2.64], R5",
        "LDC.64 R2, c[0x0][UR9+0x10]",
        "LDS R2, [R4+UR9+0x400]",
        "STS [UR9], R2",
        "SYNCS.EXCH.64 URZ, [UR4], UR9",
        "UTMALDG.2D [UR4], [UR9]",
        "UBLKCP.S.G [UR4], [UR4], UR9",
        "UTCHMMA gdesc[UR4], gdesc[UR4], tmem[UR9], tmem[UR4], idesc[UR4], UPT",
        "@!UP0 BRA.DIV ~URZ, UR9",
    ],
)
def test_every_way_of_reading_is_seen(line):
    assert compiler_errors.unwritten(listing("LDCU.64 UR4, c[0x0][0x380]", line)) == {"UR9": line}


@pytest.mark.parametrize(
    "line",
    [
        *["ULDC UR9, c[0x0][0x208]", "ULDC.64 UR8, c[0x0][0x208]", "LDCU.128 UR8, c[0x0][0x380]", "UMOV UR9, URZ"],
        *["R2UR UR9, R2", "R2UR P0, UR9, R2", "R2UR.OR P0, UR9, R2.reuse", "S2UR UR9, SR_CTAID.X"],
        *["CS2UR UR8, SR_CLOCKLO", "REDUX.SUM.S32 UR9, R2", "CREDUX.MAX.S32 UR9, R2", "VOTEU.ANY UR9, UPT, PT"],
        *["UIADD3 UR9, UP0, URZ, 0x1, URZ", "UIADD3 UR9, UPT, UPT, URZ, 0x1, URZ", "UIADD3.64 UR8, URZ, 0x1, URZ"],
        *["UIMAD.WIDE.U32 UR8, URZ, 0x2, URZ", "ULEA UR9, UP0, URZ, URZ, 0x2", "UFLO.U32 UR9, URZ", "UPOPC UR9, URZ"],
        *["USHF.L.U64.HI UR9, URZ, 0x2, URZ", "@UP0 USEL UR9, URZ, 0x7, UP0", "ELECT P1, UR9, PT", "UP2UR UR9, UPR"],
        *["UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR9, URZ", "UMOV.64 UR8, URZ", "UNKNOWN.X UR9, R2"],
    ],
)
def test_every_way_of_writing_is_seen(line):
    assert compiler_errors.unwritten(listing(line, "STS [UR9], R2")) == {}
    assert compiler_errors.unwritten(listing("S2R R2, SR_TID.X", "STS [UR9], R2")) == {"UR9": "STS [UR9], R2"}


def test_the_other_registers_of_an_operand_are_not_read_as_far_as_is_said():
    lines = ("ULDC UR4, c[0x0][0x208]", "HGMMA.64x16x16.F32 R24, gdesc[UR8], R24", "LDG.E R2, desc[UR4][R2.64]")
    assert compiler_errors.unwritten(listing(*lines)) == {}


STEP = "UIADD3 UR9, UP0, UR9, 0x40, URZ"


@pytest.mark.parametrize(
    "lines",
    [
        (STEP, "UMOV UR9, URZ"),
        ("@P0 BRA 0x30", STEP, "@P1 BRA 0x10", "EXIT", "BRA 0x40"),  # a loop that adds to what it never began with
        ("@P0 BRA 0x40", "STS [UR9], R2", "UMOV UR9, URZ", "@P1 BRA 0x10", "EXIT"),  # written below, for the next turn
        ("BSSY B0, 0x40", "@P0 BRA 0x30", "STS [UR9], R2", "BSYNC B0", "UMOV UR9, URZ", "EXIT"),
    ],
)
def test_a_register_that_is_written_too_late_is_found(lines):
    assert list(compiler_errors.unwritten(listing(*lines))) == ["UR9"]


@pytest.mark.parametrize(
    "lines",
    [
        ("@P0 UMOV UR9, URZ", STEP),
        ("@P0 BRA 0x20", "UMOV UR9, URZ", STEP),  # on one way only
        ("BRA 0x30", STEP, "EXIT", "UMOV UR9, URZ", "BRA 0x10"),  # above it in the listing, but later
        ("@P0 BRA 0x30", "@P1 BRA 0x50", "EXIT", "UMOV UR9, URZ", "BRA 0x10", STEP, "EXIT"),
        ("BSSY B0, 0x30", STEP, "EXIT", "UMOV UR9, URZ", "@P0 BRA 0x10"),  # where BSYNC may go on
        ("MOV R2, UR9", "UMOV UR9, URZ", STEP, "R2UR UR9, R2"),  # saved and put back
        ("IMAD.U32 R2, RZ, RZ, UR9", "UMOV UR9, URZ", STEP),
        ("CALL.REL.NOINC 0x30", STEP, "EXIT", "UMOV UR9, URZ", "RET.REL.NODEC R2 0x10"),
        ("BRX R2 -0x20", STEP, "UMOV UR9, URZ", "EXIT"),
        ("BRA `(.L_x_1)", STEP, "UMOV UR9, URZ", "EXIT"),
    ],
)
def test_a_register_that_may_have_been_written_is_not_found(lines):
    assert compiler_errors.unwritten(listing(*lines)) == {}


def test_several_functions_are_taken_together():
    assert compiler_errors.unwritten(listing(STEP, "EXIT") + "\n" + listing("UMOV UR9, URZ", "EXIT")) == {}
    assert list(compiler_errors.unwritten(listing("STS [UR9], R2", "EXIT") + "\n" + listing("EXIT"))) == ["UR9"]


@pytest.mark.parametrize("capability", offline.CAPABILITIES)
def test_correct_kernels_read_what_they_have_written(capability):
    for launch in (copy(), matmul(), *([spill()] if capability == 90 else [])):
        assert compiler_errors.unwritten_registers(launch, capability) == {}


def extend_launch(K, V, dtype, name, **choices):
    """A launch of an extend of two sequences, K-first, for which nothing was compiled wrongly."""
    T, H, HV = 128, 1, 2
    q, v = torch.empty((T, H, K), dtype=dtype), torch.empty((T, HV, V), dtype=dtype)
    state, g = torch.empty((2, HV, K, V)), torch.empty((T, HV))
    x = chunked.ExtendInputs(q, q, v, g, g, torch.tensor([0, 70, T]), state, state, torch.empty_like(v), 1.0)
    return chunked.extend(x, False, **choices).launches[name]


def needs_ptxas(version):
    from triton import knobs

    if (found := knobs.nvidia.ptxas.version) != version:
        pytest.skip(f"ptxas is {found}, and what is found here is an error of {version}: see whether it is still there")


def test_ptxas_12_8_takes_an_address_from_a_register_that_nothing_has_written():
    """The left operand of the product in registers, 16 columns."""
    launch = extend_launch(32, 16, torch.float16, "output")
    narrow = dataclasses.replace(launch, args={**launch.args, "BK": 32, "BV": 16})
    assert compiler_errors.unwritten_registers(launch, 90) == {}
    needs_ptxas("12.8")
    (text,) = compiler_errors.unwritten_registers(narrow, 90).values()
    assert text.startswith("UIADD3 UR")


def test_ptxas_12_8_adds_to_a_register_that_nothing_has_written():
    """Both operands in shared memory, 32 columns, loads not pipelined."""
    launch = extend_launch(128, 128, torch.bfloat16, "chunk_state", tile=32)
    assert compiler_errors.unwritten_registers(launch, 90) == {}
    needs_ptxas("12.8")
    found = compiler_errors.unwritten_registers(
        dataclasses.replace(launch, options={"num_warps": 4, "num_stages": 1}), 90
    )
    assert len(found) == 2  # both halves of an address
    assert all(text.startswith("UIADD3") for text in found.values())


# operands that are overwritten


@pytest.mark.parametrize("stages", [2, 3])
def test_a_tile_that_is_loaded_while_it_is_read_is_found(stages):
    """The operands of a product, summed as well: the control is the product alone."""
    options = {"num_warps": 4, "num_stages": stages}
    product = dataclasses.replace(matmul(), options=options)
    squares = dataclasses.replace(squared_matmul(), options=options)
    assert compiler_errors.overwritten_operands(product, 90) == {}
    found = compiler_errors.overwritten_operands(squares, 90)
    assert list(found.values()) == [f"room for {stages - 1}, {stages - 1} ahead"]
    assert compiler_errors.overwritten_operands(squares, 80) == {}  # no wgmma there, and products are waited for


IR = """
%a = ttg.local_alloc : () -> !ttg.memdesc<ROOMx64x64xbf16, #shared, #smem, mutable> loc(#loc7)
%a_1 = ttg.memdesc_index %a[%c0] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc8)
%a_2 = ttg.async_copy_global_to_local %p, %a_1 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16> loc(#loc8)
%r = scf.for %i = %c0 to %c8 step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>) {
  %a_3 = ttg.memdesc_index %a[%i] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc8)
  %a_4 = ttg.memdesc_trans %a_3 {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16> loc(#loc8)
  %d = ttng.warp_group_dot %b, %a_4, %acc {isAsync = true} : !ttg.memdesc<64x64xbf16> loc(#loc9)
  %w = ttng.warp_group_dot_wait %d, %a_4 {pendings = PENDING : i32} : tensor<64x64xf32> loc(#loc9)
  %n = scf.if %more -> (i32) {
    scf.yield %c1 : i32 loc(#loc10)
  } else {
    scf.yield %c0 : i32 loc(#loc10)
  } loc(#loc10)
  %a_5 = ttg.memdesc_index %a[%n] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc8)
  %a_6 = ttg.async_copy_global_to_local %p, %a_5 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16> loc(#loc8)
  scf.yield %w : tensor<64x64xf32> loc(#loc11)
} loc(#loc11)
"""


@pytest.mark.parametrize(("room", "pending", "wrong"), [(1, 1, True), (2, 1, False), (1, 0, False)])
def test_room_and_waiting_are_counted(room, pending, wrong):
    """Room for one tile more, or a product that has been waited for, is enough."""
    found = compiler_errors.overwritten(IR.replace("ROOM", str(room)).replace("PENDING", str(pending)))
    assert found == ({"%a": f"room for {room}, 1 ahead"} if wrong else {})


@pytest.mark.parametrize(("rooms", "wrong"), [((2, 2), False), ((2, 1), True), ((1, 2), True)])
def test_branches_that_use_the_same_names_are_looked_at_apart(rooms, wrong):
    """Each has its own loop and loads its own tiles before it: together they would be more than there is room for."""
    first, second = (IR.replace("ROOM", str(room)).replace("PENDING", "1") for room in rooms)
    found = compiler_errors.overwritten(f"scf.if %6 {{{first}}} else {{\n%x = arith.constant 1 : i32{second}}}\n")
    assert found == ({"%a": "room for 1, 1 ahead"} if wrong else {})
