"""Interpreted, a launch patches Triton's language once for each module, not again in every helper that a kernel calls.

Each time it looks at all names of the language, which takes longer than what most helpers do, and changes nothing.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch, _launch, _patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def _patch_once(function):
        if (module := function.__module__) not in _patched:
            _patched.add(module)
            return _patch(function)
        return None

    def _launch_anew(self, *args, **kwargs):
        _patched.clear()  # what a launch has patched, it restores
        return _launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _patch_once, _launch_anew
