# Sourced by run_train.sh and run_tests.sh with harts_root (this checkout) set: an environment with harts_titan and the
# extras in $1 (for example "dev").
#
# An active virtual or conda environment is used as it is. Otherwise .venv is made in the checkout; it sees the system's
# packages when the system Python already has torch (GPU images), so that build is kept.
harts_extras="${1:-}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
  if [ ! -x "$harts_root/.venv/bin/python" ]; then
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
      "$harts_python" -m venv --system-site-packages "$harts_root/.venv"
    else
      "$harts_python" -m venv "$harts_root/.venv"
    fi
  fi
  # shellcheck disable=SC1091
  . "$harts_root/.venv/bin/activate"
fi
# Install once per checkout, pyproject.toml and set of extras. The stamp is the environment's, so that an environment that
# two checkouts share is installed anew when the other one takes its turn.
harts_prefix="$(python -c 'import sys; print(sys.prefix)')"
harts_want="$(printf '%s\n' "$harts_root"; cat "$harts_root/pyproject.toml")"
if [ "$(cat "$harts_prefix/.harts_titan-$harts_extras" 2>/dev/null)" != "$harts_want" ]; then
  echo "Installing harts_titan${harts_extras:+[$harts_extras]} into $harts_prefix (once)" >&2
  python -m pip install --quiet --editable "$harts_root${harts_extras:+[$harts_extras]}"
  rm -f "$harts_prefix"/.harts_titan-*
  # Any set of extras includes the plain install.
  printf '%s\n' "$harts_want" | tee "$harts_prefix/.harts_titan-" > "$harts_prefix/.harts_titan-$harts_extras"
fi
