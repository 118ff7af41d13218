"""A whole token of a Llama model in one launch: a persistent kernel that works through tables in device memory.

    prepare(model, load_weights(model, folder)).generate(prompt, 64)
    prepare(model, load_weights(model, folder), batch=4).generate_each(prompts, 64)  # of one length

It needs the GPU for itself: all its programs must be resident at once.
"""

from labkit.kernels.lazy import exported

__getattr__, __all__ = exported(
    __name__,
    {
        "decode": "Decode prepare",
        "model": "Decoder decoder load_weights random_weights",
        "tables": "Lowering lower",
        "validate": "validate TableError",
        "step": "allocate upload generate Choice Memory",
        "streamed": "StreamChoice StreamedMemory",
    },
)
