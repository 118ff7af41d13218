"""What a machine may lack, in the words of the tests that it then cannot run."""

from labkit import sources

NO_BROWSER = "no Chromium on this machine: the pages were not opened in a browser"
NO_CLUSTER = "no SLURM, or no Snakemake, on this machine: jobs were not run on a cluster: pip install labkit[cluster]"
NO_DSL = "no CuTe DSL on this machine: kernels in it were not compiled: pip install labkit[cutlass]"
NO_GPU = "no CUDA device: the GPU tests did not run"
NO_NVCC = "no nvcc, or no headers of cuBLAS, on this machine: others' CUDA kernels were not compiled"
NO_SOURCES = "others' kernels are not on this machine: labkit fetch"


def sources_missing(*names: str) -> bool:
    """Whether any release of these packages has not been fetched; without names: of those that are always fetched."""
    return not all(sources.is_fetched(made) for made in sources.named(names))
