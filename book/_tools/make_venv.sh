#!/bin/sh
# Make the one virtual environment. Usage: PYTHON=python3.11 make_venv.sh .venv
# With PYTHON unset or empty, the first interpreter of at least 3.11 is taken. An environment that works is kept.
set -eu
venv=$1

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ -x "$venv/bin/python" ] && fits "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

found=
for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    if fits "$candidate"; then found=$candidate; break; fi
done
if [ -z "$found" ]; then
    echo "This needs Python 3.11 or newer, and ${PYTHON:-neither python3.11 nor python3} is not that." >&2
    echo "Install it (Debian and Ubuntu: apt-get install python3 python3-venv; macOS: brew install python@3.11)," >&2
    echo "or name an interpreter: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
fi

echo "== Making $venv with $("$found" --version)"
rm -rf "$venv"
# Debian ships Python without ensurepip: then the pip that is there installs one into the new environment.
if ! "$found" -m venv "$venv" >/dev/null 2>&1; then
    rm -rf "$venv"
    "$found" -m venv --without-pip "$venv"
    "$found" -m pip --python "$venv/bin/python" install pip || {
        rm -rf "$venv"
        echo "$found has neither ensurepip nor a usable pip. Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
fi
