"""What compiled code is said to be, on kernels whose code is known, for every generation of GPU without one."""

import dataclasses
import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from labkit import isolated, paths, studies
from labkit.evidence import compiled, workers
from labkit.state_layout import extend

SOURCES = {
    "copy": ("kernels_for_tests:copy", {}),
    "unaligned": ("kernels_for_tests:copy", {"offset": 1}),
    "bytes": ("kernels_for_tests:copy", {"dtype": "int8", "block": 32}),
    "tile": ("kernels_for_tests:tile", {"rows": 128, "cols": 8, "row_stride": 128}),
    "matmul": ("kernels_for_tests:matmul", {}),
}


@pytest.fixture(scope="module")
def table():
    return compiled.table(SOURCES).set_index(["source", "capability"])


@pytest.mark.parametrize("capability", compiled.CAPABILITIES)
def test_load_and_store_widths(table, capability):
    def widths(source):
        return table.loc[(source, capability), ["loads", "stores"]].tolist()

    assert widths("copy") == [{"128": 1}, {"128": 1}]
    assert widths("unaligned") == [{"32": 4}, {"128": 1}]  # the control: a load that lost its alignment
    assert widths("bytes") == [{"8": 1}, {"8": 1}]
    assert widths("tile") == [{"32": 1, "128": 8}, {"32": 1}]


@pytest.mark.parametrize("capability", compiled.CAPABILITIES)
def test_other_figures(table, capability):
    copy, tile = table.loc[("copy", capability)], table.loc[("tile", capability)]
    assert copy["arch"] == capability
    assert (copy["num_warps"], copy["shared_bytes"], copy["spill_bytes"], copy["shuffles"]) == (1, 0, 0, 0)
    assert 8 <= copy["registers"] <= 32
    assert copy["registers"] < tile["registers"]
    assert 10 < copy["instructions"] < tile["instructions"]
    assert copy["ctas_per_sm"] == (24 if capability == 120 else 32)
    assert tile["shuffles"] >= 8  # eight sums across lanes


@pytest.mark.parametrize(("capability", "name"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA"), (120, "HMMA")])
def test_matrix_instructions(table, capability, name):
    matmul = table.loc[("matmul", capability)]
    assert {text.partition(".")[0] for text in matmul["matrix"]} == {name}
    assert matmul["loads"] == {"128": sum(matmul["loads"].values())}  # asynchronous copies, 16 bytes each
    assert matmul["barriers"] > 0
    assert matmul["shared_bytes"] >= 32768
    assert 0 < matmul["ctas_per_sm"] < 8


def test_spills():
    found = compiled.table({"spill": ("kernels_for_tests:spill", {})}, [90]).iloc[0]
    assert found["spill_bytes"] > 1000
    assert found["spill_stores"] > 100
    assert found["spill_loads"] > 100


LISTING = """
 Function kernel:
  REG:66 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0

	code for sm_90a
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
                                                                 /* 0x000e300000000800 */
        /*0010*/              @!P0 LDG.E.128 R32, desc[UR10][R26.64] ;
        /*0020*/                   LDG.E.U16.CONSTANT R5, desc[UR10][R4.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR8][R8.64] ;
        /*0040*/                   LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64] ;
        /*0050*/                   UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*0060*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0070*/               @P1 STG.E desc[UR10][R4.64], R5 ;
        /*0080*/                   STG.E.64 desc[UR10][R4.64], R6 ;
        /*0090*/                   LDS.128 R4, [R5] ;
        /*00a0*/                   STL [R1], R5 ;
        /*00b0*/                   LDL.64 R6, [R1] ;
        /*00c0*/                   SHFL.BFLY PT, R4, R5, 0x10, 0x1f ;
        /*00d0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00e0*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*00f0*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0 ;
        /*0100*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*0110*/                   EXIT ;
        /*0120*/                   BRA 0x120;
        /*0130*/                   NOP;
"""


def test_a_listing_read_by_hand():
    assert compiled.parse(LISTING) == {
        "registers": 66,
        "spill_bytes": 16,
        "spill_stores": 1,
        "spill_loads": 1,
        "loads": {"128": 2, "16": 1, "256": 1, "bulk": 1, "tma": 1},
        "stores": {"32": 1, "64": 1},
        "atomics": 1,
        "shuffles": 1,
        "barriers": 1,
        "matrix": {"HGMMA.64x64x16.F32": 2},
        "instructions": 19,
    }


def test_a_listing_without_a_kernel_is_an_error():
    with pytest.raises(ValueError, match="no kernel in cuobjdump's listing"):
        compiled.parse("Resource usage:\n Common:\n  GLOBAL:0\n")


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
    assert compiled.unwritten(WRONG) == {"UR21": "UIADD3 UR4, UP0, UR21, 0x20, URZ"}
    assert compiled.unwritten(WRONG.replace("UR21", "UR4")) == {}
    assert compiled.unwritten("") == {}


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
    assert compiled.unwritten(listing("LDCU.64 UR4, c[0x0][0x380]", line)) == {"UR9": line}


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
    assert compiled.unwritten(listing(line, "STS [UR9], R2")) == {}
    assert compiled.unwritten(listing("S2R R2, SR_TID.X", "STS [UR9], R2")) == {"UR9": "STS [UR9], R2"}


def test_the_other_registers_of_an_operand_are_not_read_as_far_as_is_said():
    lines = ("ULDC UR4, c[0x0][0x208]", "HGMMA.64x16x16.F32 R24, gdesc[UR8], R24", "LDG.E R2, desc[UR4][R2.64]")
    assert compiled.unwritten(listing(*lines)) == {}


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
    assert list(compiled.unwritten(listing(*lines))) == ["UR9"]


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
    assert compiled.unwritten(listing(*lines)) == {}


def test_several_functions_are_taken_together():
    assert compiled.unwritten(listing(STEP, "EXIT") + "\n" + listing("UMOV UR9, URZ", "EXIT")) == {}
    assert list(compiled.unwritten(listing("STS [UR9], R2", "EXIT") + "\n" + listing("EXIT"))) == ["UR9"]


@pytest.mark.parametrize("capability", compiled.CAPABILITIES)
def test_correct_kernels_read_what_they_have_written(capability):
    import kernels_for_tests

    for launch in (kernels_for_tests.copy(), kernels_for_tests.matmul(), kernels_for_tests.spill()):
        assert compiled.unwritten_registers(launch, capability) == {}


def extend_launch(K, V, dtype, name, **choices):
    """A launch of an extend of two sequences, K-first, for which nothing was compiled wrongly."""
    T, H, HV = 128, 1, 2
    q, v = torch.empty((T, H, K), dtype=dtype), torch.empty((T, HV, V), dtype=dtype)
    state, g = torch.empty((2, HV, K, V)), torch.empty((T, HV))
    x = extend.ExtendInputs(q, q, v, g, g, torch.tensor([0, 70, T]), state, state, torch.empty_like(v), 1.0)
    return extend.extend(x, False, **choices).launches[name]


def needs_ptxas(version):
    from triton import knobs

    if (found := knobs.nvidia.ptxas.version) != version:
        pytest.skip(f"ptxas is {found}, and what is found here is an error of {version}: see whether it is still there")


def test_ptxas_12_8_takes_an_address_from_a_register_that_nothing_has_written():
    """The left operand of the product in registers, 16 columns."""
    launch = extend_launch(32, 16, torch.float16, "output")
    narrow = dataclasses.replace(launch, args={**launch.args, "BK": 32, "BV": 16})
    assert compiled.unwritten_registers(launch, 90) == {}
    needs_ptxas("12.8")
    (text,) = compiled.unwritten_registers(narrow, 90).values()
    assert text.startswith("UIADD3 UR")


def test_ptxas_12_8_adds_to_a_register_that_nothing_has_written():
    """Both operands in shared memory, 32 columns, loads not pipelined."""
    wide = {"K": 128, "V": 128, "dtype": torch.bfloat16, "name": "chunk_state", "tile": 32}
    assert compiled.unwritten_registers(extend_launch(**wide, num_stages=2), 90) == {}
    needs_ptxas("12.8")
    found = compiled.unwritten_registers(extend_launch(**wide, num_stages=1), 90)
    assert len(found) == 2  # both halves of an address
    assert all(text.startswith("UIADD3") for text in found.values())


def test_offline_refuses_other_capabilities():
    with pytest.raises(ValueError, match="capability is 75; allowed: 80, 90, 100, 120"), compiled.offline(75):
        pass


def test_offline_restores_the_driver_even_after_an_error():
    from triton.runtime import driver

    def fail():
        with compiled.offline(120):
            assert driver.active.get_current_target().arch == 120
            raise ZeroDivisionError

    before = driver._active
    with compiled.offline(90):
        assert driver.active.get_current_target().arch == 90
        with pytest.raises(ZeroDivisionError):
            fail()
        assert driver.active.get_current_target().arch == 90
    assert driver._active is before


def test_a_missing_or_failing_tool_is_named(monkeypatch):
    from triton import knobs

    with pytest.raises(RuntimeError, match="cuobjdump cannot read the kernel"):
        compiled._cuobjdump(b"no cubin")

    class Missing:
        @property
        def path(self):
            raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(knobs, "nvidia", SimpleNamespace(cuobjdump=Missing()))
    with pytest.raises(FileNotFoundError, match="Triton's cuobjdump"):
        compiled._cuobjdump(b"")


def test_a_kernel_of_the_interpreter_is_refused():
    from triton.runtime.interpreter import InterpretedFunction

    def kernel():
        pass

    with pytest.raises(RuntimeError, match="kernel was made for the interpreter"):
        compiled.build(SimpleNamespace(kernel=InterpretedFunction(kernel)), 90)


def test_workers_compile_beside_the_interpreter_and_answers_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sources = {"copy": SOURCES["copy"]}
    first = compiled.table(sources, [90])
    assert first["loads"].tolist() == [{"128": 1}]

    calls = []
    monkeypatch.setattr(isolated, "call_many", lambda wanted, workers: calls.extend(wanted))
    pd.testing.assert_frame_equal(compiled.table(sources, [90]), first)
    assert not calls
    monkeypatch.setattr(workers, "_version", lambda name: "another")
    with pytest.raises(FileNotFoundError):  # asked for anew, and nobody answered
        compiled.table(sources, [90])
    assert len(calls) == 1


def test_a_failing_source_is_an_error():
    with pytest.raises(isolated.IsolatedError, match=r"TypeError: .*no_such_argument"):
        compiled.table({"bad": ("kernels_for_tests:copy", {"no_such_argument": 1})}, [90])


def test_variants_of_a_study():
    study = studies.load("state_layout")
    case = study.tiny[0]
    names = [variant.name for variant in study.variants(case) if variant.role != "ceiling"][:2]
    found = compiled.for_variants("state_layout", [(case, name) for name in names], [90])
    assert found["variant"].tolist() == names
    assert set(found["case"]) == {case.key}
    assert (found["registers"] > 0).all()
    json.dumps(found.to_dict("records"))
    with pytest.raises(KeyError, match="state_layout has no variant"):
        compiled.for_variants("state_layout", [(case, "none")], [90])


@pytest.mark.gpu
def test_on_a_gpu_the_driver_agrees():
    """Registers, spills and occupancy of kernels that are loaded, as CUDA's driver gives them."""
    import ctypes

    import kernels_for_tests
    import torch

    cuda = ctypes.CDLL("libcuda.so.1")
    for launch in (
        kernels_for_tests.copy(),
        kernels_for_tests.tile(128, 8, 128),
        kernels_for_tests.tile(128, 128, 128, num_warps=4),
        kernels_for_tests.matmul(),
        kernels_for_tests.matmul(128, 128, num_warps=8),
        kernels_for_tests.spill(),
    ):
        args = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in launch.args.items()}
        launch = type(launch)(launch.kernel, launch.grid, args, launch.options)
        kernel = launch()
        found = compiled.evidence(launch)
        assert found["arch"] == 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
        assert found["registers"] == kernel.n_regs
        assert (found["spill_bytes"] > 0) == (kernel.n_spills > 0)
        count = ctypes.c_int()
        threads, shared = 32 * found["num_warps"], ctypes.c_size_t(found["shared_bytes"])
        function = ctypes.c_void_p(kernel.function)
        assert not cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(count), function, threads, shared)
        assert found["ctas_per_sm"] == count.value
