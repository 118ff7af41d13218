"""Names of the study's variants, in the order of its pages; needs neither torch nor Triton."""

TABLES = ("buffers", "records", "queue")

# The ways to keep the tables (ways.py)
REBUILT = "1 rebuilt in Python, pageable"
VECTORISED = "2 rebuilt vectorised, pageable"
PREBUILT = "3 prebuilt, pageable"
PINNED = "4 pinned, double-buffered"
ONE_POSITION = "5 one position replayed"
ONE_BY_ONE = "6 words from the host, one by one"
PACKED = "6 words from the host, packed"
BY_KERNEL = "7 words by a kernel"
IN_LAUNCH = "8 position in the launch"
GRAPH = "9 CUDA graph, position on the GPU"


def alone(way: str, table: str) -> str:
    """A way with one table alone, while the others stay on the device."""
    return f"{way}: {table} alone"


WAYS = (REBUILT, VECTORISED, PREBUILT, PINNED, ONE_POSITION, ONE_BY_ONE, PACKED, BY_KERNEL, IN_LAUNCH, GRAPH)
ALONE = tuple(alone(way, table) for way in (REBUILT, PREBUILT) for table in TABLES)
BUILT = (REBUILT, *(alone(REBUILT, table) for table in TABLES), VECTORISED)  # by the host, for every token
SWEPT = (VECTORISED, PREBUILT, PINNED, PACKED, BY_KERNEL, IN_LAUNCH, GRAPH)  # over records and kernel time
POSITION_FROM = ("record", "launch", "device")  # where the step reads the position
PARTS = ("build", "copy", "launch")  # of the host's work for a token


def part(way: str, which: str) -> str:
    """The host's time for one part of a token."""
    return f"{way} · {which}"


# The same decoder without the host: all launches of some tokens in one CUDA graph
OURS = "tables"
LONGEST = "tables, longest first"
UNORDERED = "tables, nobody waits"  # wrong results: the same work and bytes without barriers
NOT_AHEAD = "tables, nothing loaded before a wait"
FETCHED = "tables, more asked for in the L2 before a wait"
MARKED = "tables, moments written down"
ABLATIONS = {NOT_AHEAD: {"ahead": 0}, FETCHED: {"prefetch": 16384}, MARKED: {"marks": True}}  # changes of the choice
CUBLAS, GEMV = "kernels, cuBLAS", "kernels, our GEMV"
CUBLAS_DEPENDENT, GEMV_DEPENDENT = f"{CUBLAS}, dependent launch", f"{GEMV}, dependent launch"
SEPARATE = (CUBLAS, GEMV)
DEPENDENT = (CUBLAS_DEPENDENT, GEMV_DEPENDENT)
READ = "read as many bytes"
REPLAYED = "graph of kernels, a replay a token"  # beside the ways: our GEMV, dependent launch

# Models and cases
H1024, LLAMA = "AutoMegaKernel h1024", "Llama-3.2-1B"
MODELS = (H1024, "AutoMegaKernel h2048", LLAMA)
START = 16  # position of the first token, as in the published comparison
CACHE = 2048  # positions
SPANS = {LLAMA: 128}  # model: positions that one record of attention reads; of the others all, as was published
PUBLISHED_PARTS = 20  # records a projection at most: as many records of h1024 as were published, within 2 %
PUBLISHED_RECORDS = 402
QUEUED_US = 1000  # of other work on the stream
