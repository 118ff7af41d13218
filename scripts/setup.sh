#!/bin/sh
# Makes .venv with the versions in requirements.lock; repairs it; does nothing when it is as it should be.
#
# PYTHON in the environment names the interpreter; without it that of .venv stays, or else the first new enough.
# The stamp .venv/labkit.stamp is written last. Its first line says which folder and Python .venv is for: if that is
# wrong, or there is no stamp because a set-up was interrupted, .venv is made anew, since pip takes a half-installed
# package for a whole one. Its second line is a checksum of what is to be installed: if only that differs, pip updates.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME # packages found there would count as installed

venv=.venv
python=$venv/bin/python
stamp=$venv/labkit.stamp
log=.cache/setup.log

say() { printf 'labkit: %s\n' "$*"; }
fail() { say "$@" >&2; exit 1; }

# The interpreter to make .venv with: never that of a virtual environment, which may be the one to be replaced.
find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- "$python" python3 python3.13 python3.12 python3.11; fi
    for name; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$name" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
            return
        fi
    done
    name=${PYTHON:-python3}
    fail "Python 3.11 or newer is needed; $name is $("$name" -V 2>&1 || true)." \
        "Install one or name it: make report PYTHON=/path/to/python3.12"
}

# Waits until no other set-up runs: a lock on file descriptor 9. A pip that outlives a killed set-up holds it too.
lock() {
    mkdir -p .cache
    exec 9>>.cache/setup.lock
    "$base" -c '
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("labkit: waiting for another set-up to end", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
'
}

make_venv() {
    say "making $venv with $("$base" -V)"
    rm -rf "$venv"
    "$base" -m venv "$venv" >"$log" 2>&1 && return
    cat "$log" >&2
    fail "could not make $venv; Debian and Ubuntu need: apt install python3-venv"
}

# Runs pip with its output in the log, and shows the large downloads only.
install() {
    say "installing; the first time this takes minutes (torch for CUDA is some gigabytes)"
    { "$python" -m pip install --disable-pip-version-check -c requirements.lock -e '.[test]' 2>&1 || echo FAILED; } |
        awk -v out="$log" '
            /^FAILED$/ { failed = 1; next }
            { print > out }
            /^ *Downloading .*MB\)/ { sub(/^ *Downloading ([^ ]*\/)?/, "    "); print; fflush() }
            /^Installing collected/ { print "    installing packages: " NF - 3; fflush() }
            END { exit failed }' && return
    tail -n 20 "$log" >&2
    fail "pip could not install; its whole output is in $log"
}

base=$(find_python)
lock
place="$(pwd -P) $("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
inputs=$(cat pyproject.toml requirements.lock scripts/setup.sh | cksum)
[ -x "$python" ] && [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$place" ] || make_venv
[ "$(sed -n 2p "$stamp" 2>/dev/null)" != "$inputs" ] || exit 0
rm -f "$stamp"
install
printf '%s\n%s\n' "$place" "$inputs" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "$venv is ready"
