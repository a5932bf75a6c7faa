# Sourced by run_train.sh and run_tests.sh: an environment with harts_titan and the extras in $1 (for example "dev").
#
# An active virtual or conda environment is used as it is. Otherwise .venv is made beside this checkout; it sees the
# system's packages when the system Python already has torch (GPU images), so that build is kept.
harts_extras="${1:-}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    harts_python=""
    for candidate in python3.12 python3.11 python3 python; do
      if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        # Prefer an interpreter that already has torch.
        if "$candidate" -c 'import torch' 2>/dev/null; then harts_python="$candidate"; break; fi
        case "$candidate" in python3|python) harts_python="$candidate" ;; *) harts_python="${harts_python:-$candidate}" ;; esac
      fi
    done
    if [ -z "$harts_python" ]; then
      echo "error: Python 3.11 or 3.12 is needed and none was found on PATH; install one or activate an environment" >&2
      exit 1
    fi
    if "$harts_python" -c 'import torch' 2>/dev/null; then
      "$harts_python" -m venv --system-site-packages .venv
    else
      "$harts_python" -m venv .venv
    fi
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi
# Install once per pyproject.toml and set of extras.
harts_prefix="$(python -c 'import sys; print(sys.prefix)')"
harts_stamp="$harts_prefix/.harts_titan-$(printf '%s' "$PWD$harts_extras" | cksum | cut -d' ' -f1)"
if ! cmp -s pyproject.toml "$harts_stamp"; then
  echo "Installing harts_titan${harts_extras:+[$harts_extras]} into $harts_prefix (once)" >&2
  python -m pip install --quiet --editable ".${harts_extras:+[$harts_extras]}"
  cp pyproject.toml "$harts_stamp"
fi
