#!/usr/bin/env bash
# Check and test: ./run_tests.sh [pytest arguments]
#
# Without arguments: ruff, import-linter, mypy, then all tests on two workers. With arguments: pytest with them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/environment.sh "dev"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
ruff check .
ruff format --check .
lint-imports
mypy
python -m pytest -n "${HARTS_TEST_WORKERS:-2}" --dist worksteal --durations 15
