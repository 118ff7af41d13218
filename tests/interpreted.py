"""Triton's interpreter without half of its time."""

import functools
import os
from types import SimpleNamespace


@functools.cache
def patch_once():
    """Have it patch Triton's language once a launch, not for every call of a helper function anew.

    Nothing is left out but to patch modules that are patched already; nothing is done where kernels are compiled.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_what_is_not(function):
        modules = [one for one in function.__globals__.values() if one is tl or one is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_what_is_not
