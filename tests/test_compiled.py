"""What compiled code is said to be, on kernels whose code is known, for every generation of GPU without one."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from answering import answered_here

from labkit import isolated, paths, registry
from labkit.evidence import compiled, workers
from labkit.kernels import offline
from labkit.sweep import variants

SOURCES = {
    "copy": ("kernels_for_tests:copy", {}),
    "unaligned": ("kernels_for_tests:copy", {"offset": 1}),
    "bytes": ("kernels_for_tests:copy", {"dtype": "int8", "block": 32}),
    "tile": ("kernels_for_tests:tile", {"rows": 128, "cols": 8, "row_stride": 128}),
    "matmul": ("kernels_for_tests:matmul", {}),
}


EVERYWHERE = ("copy", "unaligned", "matmul")  # the others are compiled for one generation of GPU


@pytest.fixture(scope="module")
def table():
    everywhere = {name: SOURCES[name] for name in EVERYWHERE}
    others = {name: source for name, source in SOURCES.items() if name not in EVERYWHERE}
    with answered_here():
        parts = [compiled.table(everywhere), compiled.table(others, [90])]
    return pd.concat(parts, ignore_index=True).set_index(["source", "capability"])


def widths(table, source, capability):
    return table.loc[(source, capability), ["loads", "stores"]].tolist()


@pytest.mark.parametrize("capability", offline.CAPABILITIES)
def test_figures_of_every_generation(table, capability):
    assert widths(table, "copy", capability) == [{"128": 1}, {"128": 1}]
    assert widths(table, "unaligned", capability) == [{"32": 4}, {"128": 1}]  # the control: it lost its alignment
    copy = table.loc[("copy", capability)]
    assert copy["arch"] == capability
    assert (copy["num_warps"], copy["shared_bytes"], copy["spill_bytes"], copy["shuffles"]) == (1, 0, 0, 0)
    assert 8 <= copy["registers"] <= 32
    assert copy["instructions"] > 10
    assert copy["ctas_per_sm"] == (24 if capability == 120 else 32)


def test_figures_of_other_kernels(table):
    assert widths(table, "bytes", 90) == [{"8": 1}, {"8": 1}]
    assert widths(table, "tile", 90) == [{"32": 1, "128": 8}, {"32": 1}]
    copy, tile = table.loc[("copy", 90)], table.loc[("tile", 90)]
    assert copy["registers"] < tile["registers"]
    assert copy["instructions"] < tile["instructions"]
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
    with answered_here():
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


def test_offline_refuses_other_capabilities():
    with pytest.raises(ValueError, match="capability is 75; allowed: 80, 90, 100, 120"), offline.offline(75):
        pass


def test_offline_restores_the_driver_even_after_an_error():
    from triton.runtime import driver

    def fail():
        with offline.offline(120):
            assert driver.active.get_current_target().arch == 120
            raise ZeroDivisionError

    before = driver._active
    with offline.offline(90):
        assert driver.active.get_current_target().arch == 90
        with pytest.raises(ZeroDivisionError):
            fail()
        assert driver.active.get_current_target().arch == 90
    assert driver._active is before


def test_a_missing_or_failing_tool_is_named(monkeypatch):
    from triton import knobs

    with pytest.raises(RuntimeError, match="cuobjdump cannot read the kernel"):
        compiled.listing_of(b"no cubin")

    class Missing:
        @property
        def path(self):
            raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(knobs, "nvidia", SimpleNamespace(cuobjdump=Missing()))
    with pytest.raises(FileNotFoundError, match="Triton's cuobjdump"):
        compiled.listing_of(b"")


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


def test_what_is_built_ahead_is_disassembled_already(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    sources = [SOURCES["copy"], ("kernels_for_tests:of_a_library", {})]
    (tmp_path / "taken").mkdir()
    compiled.build_free([(source, "") for source in sources], 90, str(tmp_path / "taken"))
    monkeypatch.setattr(compiled, "listing_of", lambda cubin: pytest.fail("disassembled again"))
    launch = compiled.launch_of(SOURCES["copy"], 90)
    assert compiled.evidence(launch, 90)["loads"] == {"128": 1}
    other = compiled.launch_of(SOURCES["tile"], 90)
    with pytest.raises(pytest.fail.Exception, match="disassembled again"):  # not built ahead
        compiled.evidence(other, 90)


@pytest.mark.parametrize("compiles", [True, False])
def test_what_launches_a_kernel_is_built_ahead_where_triton_compiles_it(compiles, monkeypatch, tmp_path):
    from triton.backends.nvidia import driver

    made = []

    def launcher(src, metadata):
        made.append((src.fn.__name__, metadata.num_warps))
        raise AssertionError("the driver's library is missing")  # which is no matter

    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    if compiles:
        monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    compiled.build_free([(SOURCES["copy"], "")], 90, str(tmp_path))
    assert made == [("_copy_kernel", 1)] * compiles


THREE = [("first", ""), ("second", ""), ("third", "")]


def test_a_source_that_another_worker_took_is_left_to_it(monkeypatch, tmp_path):
    built = []
    monkeypatch.setattr(compiled, "_build_ahead", lambda source, capability: built.append(source))
    (tmp_path / "1").touch()
    compiled.build_free(THREE, 90, str(tmp_path))
    assert built == ["first", "third"]
    compiled.build_free(THREE, 90, str(tmp_path))
    assert built == ["first", "third"]


def test_what_does_not_compile_is_said_and_leaves_the_others(monkeypatch, tmp_path):
    built = []

    def build(source, capability):
        if source == "second":
            raise ValueError("descriptor is True\nand more")
        built.append(source)

    monkeypatch.setattr(compiled, "_build_ahead", build)
    assert compiled.build_free(THREE, 90, str(tmp_path)) == ["ValueError: descriptor is True"]
    assert built == ["first", "third"]


def test_what_is_marked_is_not_made_again(monkeypatch, tmp_path):
    made, broken = SOURCES["copy"], ("kernels_for_tests:copy", {"no_such_argument": 1})
    assert len(compiled.prebuild([made, broken], 90, tmp_path)) == 1
    asked = []
    monkeypatch.setattr(isolated, "call_many", lambda calls, workers: asked.extend(calls[0].args[0]) or [])
    compiled.prebuild([made, broken, SOURCES["tile"]], 90, tmp_path)
    assert [source for source, _ in asked] == [list(broken), list(SOURCES["tile"])]  # what failed is tried again
    asked.clear()
    compiled.prebuild([made], 100, tmp_path)  # for another GPU it is another kernel
    compiled.prebuild([made], 90)
    assert [source for source, _ in asked] == [list(made)] * 2


@pytest.mark.parametrize("dissect", [True, False])
def test_of_what_nobody_asks_for_no_evidence_is_made(dissect, monkeypatch):
    described = []
    monkeypatch.setattr(compiled, "describe", lambda kernel: described.append(kernel.metadata.name))
    function, arguments = SOURCES["copy"]
    compiled._build_ahead((function, {**arguments, compiled.DISSECT: dissect}), 90)
    assert described == ["_copy_kernel"] * dissect


def test_what_could_not_be_compiled_is_handed_on():
    sources = [SOURCES["copy"], ("kernels_for_tests:copy", {"no_such_argument": 1})]
    [problem] = compiled.prebuild(sources, 90)
    assert "no_such_argument" in problem


def test_nothing_is_built_where_there_is_nothing_to_build(monkeypatch):
    monkeypatch.setattr(isolated, "call_many", lambda calls, workers: pytest.fail("a process was started"))
    assert compiled.prebuild([], 90) == []


def test_a_failing_source_is_an_error():
    with pytest.raises(isolated.IsolatedError, match=r"TypeError: .*no_such_argument"):
        compiled.table({"bad": ("kernels_for_tests:copy", {"no_such_argument": 1})}, [90])


def test_variants_of_a_study():
    study = registry.load("state_layout")
    case = study.tiny[0]
    names = [variant.name for variant in study.variants(case) if variant.role != "ceiling"][:2]
    with answered_here():
        found = variants.compiled_for("state_layout", [(case, name) for name in names], [90])
    assert found["variant"].tolist() == names
    assert set(found["case"]) == {case.key}
    assert (found["registers"] > 0).all()
    json.dumps(found.to_dict("records"))
    with pytest.raises(KeyError, match="state_layout has no variant"):
        variants.compiled_for("state_layout", [(case, "none")], [90])


@pytest.mark.gpu
def test_on_a_gpu_the_driver_agrees():
    """Registers, spills and occupancy of kernels that are loaded, as CUDA's driver gives them."""
    import ctypes

    import kernels_for_tests

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
